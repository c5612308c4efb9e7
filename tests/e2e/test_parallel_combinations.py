"""Every way to spread a model over ranks gives transformers' tokens, over HTTP, with overlap and preemptions.

A few combinations by default, all of them with the `slow` marker; several machines and Ray have files of their own.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from xllm_models.hub import resolve_model

from tests.docs.markdown import blocks
from tests.support.greedy import Case, ask_server, differences, make_prompts, reference
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

NEW_TOKENS = 24
BLOCKS = 19  # of 16 tokens: a long sequence and a few short ones
# Bytes that a rank's KV cache takes for a block, by how many ranks cut its heads; latents are not cut.
BLOCK_BYTES = {"qwen3": {1: 8192, 2: 4096}, "qwen3_moe": {1: 8192, 2: 4096}, "deepseek_v3": {1: 4096, 2: 4096}}
CONFIG = {
    "qwen3": {}, "deepseek_v3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
}
BALANCE_OFTEN = ("--eplb-update-interval", "4", "--eplb-update-threshold", "1")


def documented(kind: str) -> dict[str, tuple[str, ...]]:
    """Flags of the launch lines in docs/parallelism.md, by themselves as text."""
    (block,) = [b for b in blocks("docs/parallelism.md") if b.info == ("bash", kind)]
    return {" ".join(flags): tuple(flags) for flags in (line.split()[3:] for line in block.text.splitlines())}


DENSE, EXPERTS = documented("ranks"), documented("experts")
ALL = [("qwen3", way) for way in DENSE] + list(itertools.product(("qwen3_moe", "deepseek_v3"), EXPERTS))
FEW = [("qwen3", "--dp-size 2"), ("qwen3_moe", "--tp-size 2 --dp-size 2 --ep-size 4 --enable-eplb"),
       ("deepseek_v3", "--dp-size 2 --ep-size 2")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> (directory, cases)"""

    @cache
    def make(name):
        directory = make_tiny_model(tmp_path_factory.mktemp("models") / name, name, max_position_embeddings=256,
                                    **CONFIG[name])
        torch.set_num_threads(1)  # threads only wait for each other in a model this small
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        rng = np.random.default_rng(5)
        shared = rng.integers(0, 256, 60).tolist()
        prompts = [(shared if i % 3 == 0 else []) + rng.integers(0, 256, int(n)).tolist()
                   for i, n in enumerate(np.geomspace(1, 140, 32))]
        return directory, reference(model, prompts, NEW_TOKENS)

    return make


def check(directory, cases: list[Case], tmp_path, *flags: str) -> dict[str, float]:
    with ServerProcess(directory, tmp_path, "--dtype", "float32", *flags) as server:
        answers = ask_server(server.url, cases, NEW_TOKENS)
        server.wait_idle()
        metrics = server.metrics()
    assert differences(cases, answers) == []
    return metrics


def check_tiny(checkpoint, tmp_path, name: str, way: str) -> None:
    directory, cases = checkpoint(name)
    tp = 2 if "--tp-size 2" in way else 1
    flags = EXPERTS[way] + (BALANCE_OFTEN if "--enable-eplb" in way else ())
    metrics = check(directory, cases, tmp_path, *flags, "--max-tokens-per-chunk-for-prefill", "24",
                    "--max-tokens-per-batch", "64", "--max-cache-size", str(BLOCKS * BLOCK_BYTES[name][tp]),
                    "--prefill-scheduling-memory-usage-threshold", "1.0")
    assert metrics["num_preemptions_total"] > 0
    if "--dp-size" in way:
        assert min(metrics[f"generation_tokens_total@{rank}"] for rank in (0, 1)) > 0


@pytest.mark.parametrize(("name", "way"), FEW)
def test_few(checkpoint, tmp_path, name, way):
    check_tiny(checkpoint, tmp_path, name, way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [one for one in ALL if one not in FEW])
def test_all(checkpoint, tmp_path, name, way):
    check_tiny(checkpoint, tmp_path, name, way)


@pytest.fixture(scope="module")
def smollm2():
    directory = resolve_model("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return directory, reference(model, make_prompts(AutoTokenizer.from_pretrained(directory), 24, longest=700),
                                NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("flags", [("--tp-size", "3"), ("--dp-size", "2"), ("--tp-size", "3", "--dp-size", "2")],
                         ids=" ".join)
def test_smollm2(smollm2, tmp_path, flags):
    """Nine heads and three key/value heads: three ranks, not two, can share them."""
    directory, cases = smollm2
    tp = 3 if "--tp-size" in flags else 1
    metrics = check(directory, cases, tmp_path, *flags, "--max-model-len", "1024", "--max-tokens-per-batch", "256",
                    "--max-cache-size", f"{48 // tp}MiB", "--prefill-scheduling-memory-usage-threshold", "1.0")
    assert metrics["num_preemptions_total"] > 0
