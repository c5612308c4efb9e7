"""Loading, encoding, single tokens."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.tokenizer import Tokenizer, TokenizerError


def test_facts(tokenizers, backends):
    tokenizer, backend = tokenizers["byte_level"], backends["byte_level"]
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_id == backend.token_to_id("</s>")
    assert tokenizer.bos_token_id == backend.token_to_id("<s>")
    specials = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    assert tokenizer.special_ids == {backend.token_to_id(t) for t in specials}
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.chat_template is None


def test_encode_equals_the_library(tokenizers, backends):
    for kind, backend in backends.items():
        for special in (True, False):
            text = "the quick <|im_end|>fox\n"
            assert tokenizers[kind].encode(text, special) == backend.encode(text, add_special_tokens=special).ids


def test_truncation_and_padding_saved_with_the_tokenizer_are_off(backends, tmp_path, write_tokenizer):
    backend = type(backends["byte_level"]).from_str(backends["byte_level"].to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    ids = Tokenizer(write_tokenizer(tmp_path / "t", backend)).encode("a b c d e f g h i j")
    assert 4 < len(ids) < 64


def test_a_token_alone(tokenizers):
    tokenizer = tokenizers["byte_level"]
    for i in range(tokenizer.vocab_size):
        assert bytes(tokenizer.token_bytes(i)).decode("utf-8", "replace") == tokenizer.token_text(i)
    half = tokenizer.encode("अ")[0]
    assert tokenizer.token_bytes(half) == list("अ".encode()[: len(tokenizer.token_bytes(half))])
    assert tokenizer.token_text(half) == "�"
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == []


def test_a_token_alone_sentencepiece(tokenizers, backends):
    tokenizer, backend = tokenizers["llama2"], backends["llama2"]
    assert tokenizer.token_bytes(backend.token_to_id("<0xE0>")) == [0xE0]
    word = next(i for t, i in backend.get_vocab().items() if t.startswith("▁") and len(t) > 2)
    assert tokenizer.token_text(word) == backend.id_to_token(word).replace("▁", " ")


def test_a_token_alone_of_an_unknown_decoder(tokenizers):
    tokenizer = tokenizers["wordpiece"]
    fox = tokenizer.encode("fox")[0]
    assert (tokenizer.token_text(fox), tokenizer.token_bytes(fox)) == ("fox", list(b"fox"))


def test_a_decoder_that_only_looks_known_is_not_trusted(tokenizers, backends, tmp_path, write_tokenizer, monkeypatch):
    """Were the piece table wrong for a tokenizer, it would be noticed at loading."""
    from xllm_npu.text import tokenizer as module

    monkeypatch.setattr(module, "text_form", lambda backend: module.TextForm(module.PIECES))
    loaded = Tokenizer(write_tokenizer(tmp_path / "t", backends["byte_level"]))
    ids = loaded.encode("Grüße 你好")
    assert loaded.decode(ids) == "Grüße 你好"


def test_lone_surrogate_is_the_clients_error(tokenizers):
    with pytest.raises(InvalidParameter, match="surrogate") as e:
        tokenizers["byte_level"].encode("a\ud800b")
    assert e.value.param == "prompt"


def test_threads_get_what_one_thread_gets(tokenizers):
    tokenizer = tokenizers["llama2"]
    texts = [f"The quick {i} fox {'你' * (i % 7)}" for i in range(400)]
    alone = [tokenizer.encode(t) for t in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(tokenizer.encode, texts))
        decoded = list(pool.map(tokenizer.decode, together))
    assert together == alone
    assert decoded == [tokenizer.decode(ids) for ids in alone]


def test_missing_directory_and_missing_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match="is not a directory"):
        Tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no tokenizer: none of tokenizer\.json"):
        Tokenizer(tmp_path)


def test_broken_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_tokenizer_json_alone_is_enough(directories, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((directories["byte_level"] / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.eos_token_id is None


def test_code_in_the_directory_is_not_run(directories, tmp_path, write_tokenizer, backends):
    path = write_tokenizer(tmp_path / "t", backends["byte_level"], tokenizer_class="EvilTokenizer",
                           auto_map={"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]})  # fmt: skip
    (path / "config.json").write_text(json.dumps({"model_type": "evil"}))
    (path / "evil.py").write_text("raise SystemExit('code of a model ran')\n")
    assert Tokenizer(path).encode("hello")


def test_without_torch(directories):
    """A process that spares torch tokenizes the same, and has not imported it."""
    code = """
import json, sys
from pathlib import Path
from xllm_npu.text.tokenizer import Tokenizer, spare_torch
spare_torch()
ids = [Tokenizer(Path(p)).encode("Hello, wörld 123") for p in sys.argv[1:]]
print(json.dumps([ids, "torch" in sys.modules]))
"""
    paths = [str(path) for path in directories.values()]
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120, check=True)
    ids, torch_imported = json.loads(run.stdout.splitlines()[-1])
    assert ids == [Tokenizer(path).encode("Hello, wörld 123") for path in directories.values()]
    assert not torch_imported
