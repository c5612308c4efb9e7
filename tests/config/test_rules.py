"""What must hold between settings."""

import pytest

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load_settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--no-enable-chunked-prefill --max-model-len 20000", "--max-model-len=20000 must be at most"),
        ("--no-enable-chunked-prefill --max-tokens-per-chunk-for-prefill 8", "has no meaning with"),
        ("--max_tokens_per_chunk_for_prefill=0", "--max_tokens_per_chunk_for_prefill=0 is out of range"),
        ("--no-enable-prefix-cache --enable-in-batch-prefix-cache", "needs the prefix cache"),
        ("--dp-size 6 --ep-size 4", "--ep-size=4 must divide the 6 devices"),
        ("--no-enable-prefix-cache --enable-prefix-cache-aware-dp-routing", "needs the prefix cache"),
        ("--prefix-cache-aware-dp-routing-match-threshold 0", "it takes above 0, at most 1"),
        ("--prefix-cache-aware-dp-routing-imbalance-threshold 1.5", "it takes 0 to 1"),
        ("--ssl-keyfile {file}", "--ssl-keyfile needs --ssl-certfile"),
        ("--ssl-certfile {file}", "--ssl-certfile needs --ssl-keyfile"),
        ("--ssl-ca-certs {file}", "--ssl-ca-certs needs"),
        ("--ssl-keyfile {file} --ssl-certfile {file}.no", "there is no such file"),
        ("--uds {file}.s --port 1", "instead of --port"),
        ("--uds /nowhere/at/all.s", "its directory does not exist"),
        ("--root-path llm", "--root-path=llm must begin with /"),
        ("--root-path /llm/", "not end with it"),
        ("--chat-template nowhere.jinja", "there is no such file"),
        ("--tokenizer ./nowhere", "there is no such directory"),
        ("--tp-size 4 --ep-size 3", "--ep-size=3 must divide the 4 devices (tp_size * dp_size): use one of 1, 2, 4"),
        ("--tp-size 4 --ep-size 2 --expert-parallel-degree 2", "--expert-parallel-degree=2 needs experts shared among "
         "all 4 devices: set --ep-size=4"),
        ("--tp-size 4 --ep-size 2 --enable-expert-parallel", "among all 4 devices, and --ep-size=2 among fewer"),
        ("--enable-eplb", "--enable-eplb needs experts on several devices: set --ep-size above 1"),
        ("--tp-size 2 --ep-size 2 --redundant-experts-num 3", "--redundant-experts-num has no meaning without"),
        ("--node-rank 1", "--node-rank=1 needs --nnodes above it"),
        ("--nnodes 4 --tp-size 2", "--nnodes=4 needs a rank for each machine: --tp-size=2 times --dp-size=1 is 2"),
        ("--nnodes 2 --tp-size 2 --placement ray", "finds its machines itself: leave --nnodes out"),
        ("--nnodes 2 --tp-size 2 --node-rank 1 --master-node-addr *:1", "is no address to connect to"),
        ("--api-key schlüssel", "printable ASCII"),
    ],
)
def test_broken(tmp_path, words, said):
    file = tmp_path / "f"
    file.write_text("x")
    with pytest.raises(SettingsError) as caught:
        load_settings(words.format(file=file).split(), {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--no-enable-chunked-prefill --max-model-len 10240",
        "--max-model-len 200000",
        "--no-enable-prefix-cache",
        "--ssl-keyfile {file} --ssl-certfile {file} --ssl-ca-certs {file}",
        "--uds {file}.s",
        "--root-path /llm",
        "--chat-template {file}",
        "--chat-template {{{{messages}}}}",
        "--tokenizer org/name",
        "--tp-size 4 --ep-size 2",
        "--tp-size 4 --ep-size 2 --enable-eplb --redundant-experts-num 2 --eplb-update-interval 50",
        "--redundant-experts-num 1",
        "--tp-size 4 --enable-expert-parallel --expert-parallel-degree 2",
        "--tp-size 4 --enable-expert-parallel --ep-size 4",
        "--nnodes 2 --tp-size 2 --node-rank 1",
        "--placement ray --tp-size 4",
    ],
)
def test_kept(tmp_path, words):
    file = tmp_path / "f"
    file.write_text("x")
    load_settings(words.format(file=file).split(), {})
