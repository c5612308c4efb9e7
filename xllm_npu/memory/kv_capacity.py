"""How many KV blocks fit: plain arithmetic over bytes, no device.

The cache may take what is free now, less what must stay free for everything else on the device
(1 - max_memory_utilization of the total), less what a step needs to work in and less what captured graphs take.
`max_cache_size` replaces this rule; beside it only the graphs have to fit.
"""

from __future__ import annotations

from dataclasses import dataclass


class CacheTooSmall(RuntimeError):
    """The memory cannot hold a useful KV cache; the message says which setting to change."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheRequest:
    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_seqs: int
    free_bytes: int
    total_bytes: int
    workspace_bytes: int  # activations, logits and sampling of the largest step
    utilization: float
    graph_bytes: int = 0  # that captured graphs will take
    max_cache_bytes: int = 0  # 0: no limit of the user's
    soft_limit_bytes: int = 0  # the platform's own default limit; 0: none


def num_kv_blocks(request: CacheRequest) -> int:
    """Blocks to allocate, the dummy included; never more than all sequences could use."""
    r = request
    per_sequence = -(-r.max_model_len // r.block_size)
    if r.max_cache_bytes:
        budget = r.max_cache_bytes
        if budget + r.graph_bytes > r.free_bytes:
            graphs = f", of which graphs take {_size(r.graph_bytes)}" if r.graph_bytes else ""
            raise CacheTooSmall(f"max_cache_size is {_size(budget)} and only {_size(r.free_bytes)} are free{graphs}: "
                                "lower max_cache_size.")
    else:
        budget = r.free_bytes - int((1 - r.utilization) * r.total_bytes) - r.workspace_bytes - r.graph_bytes
        if r.soft_limit_bytes:
            budget = min(budget, r.soft_limit_bytes)
    blocks = min(budget // r.bytes_per_block, per_sequence * r.max_seqs + 1)
    if blocks < 2 and r.max_cache_bytes:
        raise CacheTooSmall(
            f"max_cache_size is {_size(r.max_cache_bytes)} and a block takes {_size(r.bytes_per_block)}, of which "
            "there must be at least two: raise max_cache_size, or lower block_size.")
    if blocks < 2:
        raise CacheTooSmall(
            f"There is no room for a KV cache: {_size(r.free_bytes)} of {_size(r.total_bytes)} are free, and a block "
            f"takes {_size(r.bytes_per_block)}. Raise max_memory_utilization or max_cache_size, or lower "
            "max_tokens_per_batch."
        )
    return int(blocks)


def longest_sequence(num_blocks: int, block_size: int) -> int:
    """Tokens that one sequence alone can have in the cache."""
    return (num_blocks - 1) * block_size


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            break
        count //= 1024
    return f"{count:,} {unit}"
