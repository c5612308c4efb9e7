"""Engines on the emulated NPU whose KV cache is in the virtual memory of ACL, fixed and growing: tokens, bytes."""

from __future__ import annotations

import pytest
from npu_emulator import fake_cann

from tests.npu_lab.test_serving import NEW_TOKENS, float32, model, prompts  # noqa: F401
from tests.support.engine import run_engine
from xllm_npu.state.kv_cache.page_allocator import PageAllocator

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32")]
VMM = {"platform": "npu", "enable_vmm_kvcache": True, "max_cache_size": "96MiB", "max_model_len": 1024}
KINDS = {"fixed": VMM, "elastic": {**VMM, "vmm_elastic": True}}
# Blocks so large that a page of 2 MiB holds few of them.
BLOCKS = {"torch": {"attention_backend": "torch", "block_size": 2048}, "triton": {"attention_backend": "triton"}}


@pytest.mark.parametrize("backend", BLOCKS)
@pytest.mark.parametrize("kind", [pytest.param("fixed", marks=pytest.mark.slow), "elastic"])
def test_same_tokens_as_on_the_cpu(model, kind, backend, monkeypatch) -> None:  # noqa: F811
    directory, expected = model("llama")
    taken = []
    take = PageAllocator.take
    monkeypatch.setattr(PageAllocator, "take", lambda self: taken.append(take(self)) or taken[-1])
    before = fake_cann.counters()
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **{**KINDS[kind], **BLOCKS[backend]})
    assert answers == expected
    assert bool(taken) == (kind == "elastic" and backend == "torch")
    left = fake_cann.counters().since(before)
    assert (left["physical_bytes_live"], left["mappings_live"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_over_virtual_memory(model, kind) -> None:  # noqa: F811
    directory, expected = model("llama")
    answers, _ = run_engine(
        directory, prompts(), NEW_TOKENS, **KINDS[kind], attention_backend="npu", enable_graph=True)
    assert answers == expected
