"""How a model's heads and experts are cut over ranks, and which sizes can be.

Query heads, MLP rows and the vocabulary are cut evenly. With more ranks than key/value heads, neighbouring ranks hold
the same key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

from xllm_platform.parallel import ExpertExchange, Group, ParallelState

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
        f"{config.num_kv_heads} key/value heads, intermediate size {' and '.join(map(str, mlp_widths(config)))} and "
        f"vocabulary {config.vocab_size}; sizes that work: {', '.join(map(str, works))}."
    )


@dataclass(frozen=True, slots=True)
class ExpertSharding:
    """Which experts this rank has, and which part of their matrices."""

    ep: Group
    moe_tp: Group
    first: int  # number of this rank's first expert
    count: int  # this rank's experts
    width: int  # of the part of an expert's intermediate size that is here
    spare: int = 0  # places for copies of busy experts

    @classmethod
    def of(cls, config: ModelConfig, parallel: ParallelState) -> ExpertSharding:
        moe, ep, moe_tp = config.moe, parallel.ep, parallel.moe_tp
        assert moe is not None
        check_expert_sharding(config, parallel.world.size, ep.size, parallel.experts)
        count = moe.num_experts // ep.size
        width = moe.intermediate_size // moe_tp.size
        return cls(ep, moe_tp, ep.rank * count, count, width, parallel.experts.redundant)


def check_expert_sharding(config: ModelConfig, world: int, ep_size: int, exchange: ExpertExchange) -> None:
    """Raise ShardingError if the experts cannot be cut over `ep_size` parts of `world` ranks."""
    moe = config.moe
    if moe is None:
        if ep_size > 1 or exchange.all_to_all:
            raise ShardingError(f"{config.architecture} has no experts: set ep_size to 1 and expert_parallel_degree to "
                                f"0 or 1, not {ep_size} and {2 if exchange.all_to_all else 1}.")
        return

    def works(size: int) -> bool:
        return (world % size == 0 and moe.num_experts % size == 0 and moe.intermediate_size % (world // size) == 0
                and not (exchange.all_to_all and size < world))

    if works(ep_size):
        most = moe.num_experts - moe.num_experts // ep_size
        if exchange.redundant > most:
            raise ShardingError(f"redundant_experts_num={exchange.redundant} is more than a rank has use for: at most "
                                f"{most} of the {moe.num_experts} experts are on other ranks.")
    else:
        sizes = [n for n in range(1, world + 1) if works(n)]
        found = f"sizes that work: {', '.join(map(str, sizes))}" if sizes else "no size works on so many devices"
        degree = " with expert_parallel_degree=2, which wants whole experts on each of them," if (
            exchange.all_to_all) else ""
        raise ShardingError(
            f"ep_size={ep_size} on {world} devices{degree} cannot cut {config.architecture} with {moe.num_experts} "
            f"experts of intermediate size {moe.intermediate_size}; {found}."
        )


def divides(config: ModelConfig, size: int) -> bool:
    """Can the model be cut over `size` ranks?"""
    larger, smaller = max(size, config.num_kv_heads), min(size, config.num_kv_heads)
    even = all(n % size == 0 for n in (config.num_heads, *mlp_widths(config), config.vocab_size))
    return even and larger % smaller == 0


def mlp_widths(config: ModelConfig) -> list[int]:
    """Intermediate sizes that tensor parallelism cuts: plain MLPs' and shared experts', not the chosen experts'."""
    moe = config.moe
    widths = [] if moe is not None and all(moe.layers) else [config.intermediate_size]
    return widths + ([moe.shared_intermediate_size] if moe is not None and moe.shared_intermediate_size else [])
