"""Where a checkpoint tensor goes: the contract between architectures (which know) and the loader (which reads bytes).

An architecture's `placements()` returns {checkpoint name: Placement}. The loader checks the file's shape against
`shape`, reads only this rank's part along `shard_dim`, and copies it into `param[dest]` in the parameter's dtype, or
gives it to `store` where a checkpoint's layout is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Placement:
    param: torch.Tensor  # local to this rank; already of its final dtype and device
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dest: tuple[slice | int, ...] = ()  # region of `param` it fills; () is all of it
    shard_dim: int | None = None  # dimension split over ranks; None: every rank reads the whole
    shard_index: int = 0  # which of `shard_count` equal parts is ours (KV heads: several ranks may share one)
    shard_count: int = 1
    optional: bool = False  # may be absent from the checkpoint
    # Along shard_dim lie several matrices, each split for itself: (size, shard index, shard count) of each. What is
    # read are their parts, one after the other; the two fields above say nothing then.
    sections: tuple[tuple[int, int, int], ...] = ()
    store: Callable[[torch.Tensor], None] | None = None  # takes the part as the file has it; the only way in for uint8
    order: torch.Tensor | None = None  # [rows of a head]: how `store` orders the rows of each head, if it does
