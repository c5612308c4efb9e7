"""How a model's heads are cut over tensor-parallel ranks, and which sizes can be.

Query heads, MLP rows and the vocabulary are cut evenly. With more ranks than key/value heads, neighbouring ranks hold
the same key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

from xllm_platform.parallel import Group

from xllm_models.config import ModelConfig


class ShardingError(ValueError):
    """The model cannot be cut over this many ranks; the message names the sizes that work."""


@dataclass(frozen=True, slots=True)
class Shard:
    group: Group
    num_heads: int  # this rank's
    num_kv_heads: int  # this rank's
    kv_index: int  # which of kv_count parts of the key/value heads is ours
    kv_count: int

    @classmethod
    def of(cls, config: ModelConfig, group: Group) -> Shard:
        size = group.size
        check_sharding(config, size)
        kv_count = min(size, config.num_kv_heads)
        return cls(group, config.num_heads // size, max(1, config.num_kv_heads // size), group.rank * kv_count // size,
                   kv_count)


def check_sharding(config: ModelConfig, size: int) -> None:
    """Raise ShardingError if the model cannot be cut over `size` ranks."""
    if divides(config, size):
        return
    works = [n for n in range(1, config.num_heads + 1) if divides(config, n)]
    raise ShardingError(
        f"tp_size={size} cannot cut {config.architecture} with {config.num_heads} attention heads, "
        f"{config.num_kv_heads} key/value heads, intermediate size {config.intermediate_size} and vocabulary "
        f"{config.vocab_size}; sizes that work: {', '.join(map(str, works))}."
    )


def divides(config: ModelConfig, size: int) -> bool:
    """Can the model be cut over `size` ranks?"""
    larger, smaller = max(size, config.num_kv_heads), min(size, config.num_kv_heads)
    even = all(n % size == 0 for n in (config.num_heads, config.intermediate_size, config.vocab_size))
    return even and larger % smaller == 0
