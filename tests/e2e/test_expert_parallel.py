"""Two ranks that share the experts give the same tokens as one process and as transformers, while experts move too."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine import run_engine
from tests.support.greedy import ask_server, differences, reference
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

NEW_TOKENS = 16
CHUNKS = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64}
BALANCED = {"enable_eplb": True, "eplb_update_interval": 4, "eplb_update_threshold": 1.0}
WAYS = {
    "experts cut": {"tp_size": 2, **CHUNKS},
    "experts shared": {"tp_size": 2, "ep_size": 2, **CHUNKS},
    "rows sent": {"tp_size": 2, "enable_expert_parallel": True, "expert_parallel_degree": 2, **CHUNKS},
    "experts move": {"tp_size": 2, "ep_size": 2, **BALANCED, **CHUNKS},
    "experts move, rows sent, graphs": {"tp_size": 2, "ep_size": 2, "expert_parallel_degree": 2, "enable_graph": True,
                                        "graph_batch_sizes": (1, 8), **BALANCED, **CHUNKS},
}


OVER_HTTP = {  # data-parallel ranks step together; where there are fewer requests than ranks, some step along
    "rows gathered, experts move": ("--dp-size", "2", "--ep-size", "2", "--enable-eplb", "--eplb-update-interval", "4",
                                    "--eplb-update-threshold", "1.0"),
    "rows sent": ("--dp-size", "2", "--enable-expert-parallel", "--expert-parallel-degree", "2"),
    "rows gathered, four ranks": ("--dp-size", "2", "--tp-size", "2", "--ep-size", "2"),
    "rows sent, four ranks, experts move": (
        "--dp-size", "2", "--tp-size", "2", "--ep-size", "4", "--expert-parallel-degree", "2", "--enable-eplb",
        "--eplb-update-interval", "4", "--eplb-update-threshold", "1.0"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, cases)"""
    directory = make_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", num_experts=8, num_experts_per_tok=3,
                                moe_intermediate_size=48, norm_topk_prob=True, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 5, 17, 40, 90)]
    return directory, reference(model, prompts, NEW_TOKENS)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", [
    w if w in ("rows sent", "experts move") else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_same_tokens(checkpoint, way, caplog):
    caplog.set_level("INFO", "xllm_npu.execution.expert_balancer")
    directory, cases = checkpoint
    answers, _ = run_engine(directory, [case.prompt for case in cases], NEW_TOKENS, **WAYS[way])
    assert differences(cases, answers) == []
    assert ("times the mean" in caplog.text) == way.startswith("experts move")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", OVER_HTTP)
def test_same_tokens_over_http_from_data_parallel_ranks(checkpoint, tmp_path, way):
    directory, cases = checkpoint
    with ServerProcess(directory, tmp_path, *OVER_HTTP[way], "--dtype", "float32", "--max-cache-size", "24MiB",
                       "--max-tokens-per-chunk-for-prefill", "24") as server:
        for some in (cases, cases[2:3], cases):  # all at once, one alone, and again after ranks had nothing to do
            assert differences(some, ask_server(server.url, some, NEW_TOKENS)) == []
            server.wait_idle()
        metrics = server.metrics()
    assert all(metrics[f"generation_tokens_total@{rank}"] > 0 for rank in (0, 1))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("settings", "message"), [
    ({"tp_size": 4, "ep_size": 4, "num_experts": 6}, r"ep_size=4 on 4 devices cannot cut .* sizes that work: 1, 2"),
    ({"tp_size": 2, "ep_size": 2, "enable_eplb": True, "redundant_experts_num": 9}, "redundant_experts_num=9 is more"),
])
def test_what_does_not_fit_is_refused(tmp_path, settings, message):
    given = dict(settings)
    directory = make_tiny_model(tmp_path, "qwen3_moe", num_experts=given.pop("num_experts", 8), num_experts_per_tok=2,
                                moe_intermediate_size=48)
    with pytest.raises(ValueError, match=message):
        run_engine(directory, [[1]], 1, **given)
