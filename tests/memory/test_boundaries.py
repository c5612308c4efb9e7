"""Which part of the memory system may know which: read from its imports."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from xllm_npu.state.kv_cache.block_manager import BlockManager
from xllm_npu.state.kv_cache.page_allocator import PageAllocator

ROOT = Path(__file__).resolve().parents[2]


def imports(path: str) -> set[str]:
    """Our own modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found.update(name for name in names if name.startswith("xllm"))
    return found


def test_rule_54_the_page_allocator_knows_neither_weights_nor_rpc():
    assert imports("xllm_npu/state/kv_cache/page_allocator.py") == {"xllm_npu.state.kv_cache.page_layout"}


def test_rules_55_and_64_backend_and_pool_are_injected():
    assert "backend" in inspect.signature(PageAllocator).parameters
    assert "pool" in inspect.signature(BlockManager).parameters


def test_rule_59_the_memory_service_does_not_know_the_coordinator():
    assert not any("coordinator" in name for name in imports("xllm_npu/memory/worker_memory_rpc.py"))
    assert not any("coordinator" in name for name in imports("xllm_npu/memory/worker_memory.py"))


def test_rule_60_generic_memory_knows_no_kv_cache_and_no_weights():
    for name in ("physical_pages", "mapped_region", "shared_mapping", "page_budget", "ownership", "device_ledger"):
        allowed = {"xllm_platform.base", "xllm_npu.memory.ownership", "xllm_npu.memory.physical_pages",
                   "xllm_npu.memory.mapped_region", "xllm_npu.memory.device_ledger", "xllm_platform.record_locks"}
        assert imports(f"xllm_npu/memory/{name}.py") <= allowed, name


def test_rule_65_local_resources_know_no_rpc():
    found = imports("xllm_npu/memory/worker_resources.py")
    assert not any(word in name for name in found for word in ("rpc", "coordinator", "worker_memory", "execution"))
