"""Collective operations over a `Group`: exact no-ops for one rank, torch.distributed above it.

Every rank of the group calls the same function with the same shapes and dtype, in the same order. Where the
backend has a current stream (nccl, hccl) the work is ordered after what that stream holds; on the CPU it has
ended on return. Averages are a sum and a division on every backend, because HCCL and gloo have no AVG: one
rule, one result. Does not know which layers communicate or why.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from xllm_platform.parallel import Group
from xllm_platform.progress import PROGRESS

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

# torch 2.13 renamed these two; older versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Reduce in place over the group's ranks (op: sum, avg, max, min) and return `tensor`, any shape."""
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    if op == "avg" and not tensor.is_floating_point():
        raise ValueError(f"an average needs a floating point tensor, got {tensor.dtype}")
    if group.size == 1:
        return tensor
    with PROGRESS:
        dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
    return tensor.div_(group.size) if op == "avg" else tensor


def all_gather(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Concatenate every rank's `tensor` along `dim`, in rank order: [..., n, ...] -> [..., size * n, ...]."""
    if group.size == 1:
        return tensor
    rows = tensor.movedim(dim, 0).contiguous()
    gathered = rows.new_empty(group.size * rows.shape[0], *rows.shape[1:])
    with PROGRESS:
        _all_gather(gathered, rows, group=group.handle)
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Sum over ranks, then keep this rank's equal part along `dim`: [..., size * n, ...] -> [..., n, ...]."""
    if group.size == 1:
        return tensor
    if tensor.shape[dim] % group.size:
        raise ValueError(f"dimension {dim} of size {tensor.shape[dim]} does not divide by {group.size} ranks")
    rows = tensor.movedim(dim, 0).contiguous()
    part = rows.new_empty(rows.shape[0] // group.size, *rows.shape[1:])
    with PROGRESS:
        _reduce_scatter(part, rows, group=group.handle)
    return part.movedim(0, dim).contiguous()


def all_to_all(
    tensor: torch.Tensor,
    group: Group,
    input_splits: list[int] | None = None,
    output_splits: list[int] | None = None,
) -> torch.Tensor:
    """Rows of dimension 0, part i to rank i; returns the parts received, in rank order.

    Splits are rows a rank, and equal parts if None. output_splits[i] has to be what rank i sends here.
    """
    if group.size == 1:
        return tensor
    if input_splits is None and tensor.shape[0] % group.size:
        raise ValueError(f"{tensor.shape[0]} rows do not divide by {group.size} ranks; give input_splits")
    tensor = tensor.contiguous()
    rows = tensor.shape[0] if output_splits is None else sum(output_splits)
    received = tensor.new_empty(rows, *tensor.shape[1:])
    with PROGRESS:
        dist.all_to_all_single(received, tensor, output_splits, input_splits, group=group.handle)
    return received


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
    """Overwrite `tensor` with that of the group's rank `source` (an index in the group), and return it."""
    if not 0 <= source < group.size:
        raise ValueError(f"source must be in 0..{group.size - 1}, got {source}")
    if group.size > 1:
        with PROGRESS:
            dist.broadcast(tensor, src=group.ranks[source], group=group.handle)
    return tensor


def barrier(group: Group) -> None:
    """Return once every rank of the group has come here."""
    if group.size > 1:
        with PROGRESS:
            dist.barrier(group=group.handle)
