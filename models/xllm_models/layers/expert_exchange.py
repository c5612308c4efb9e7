"""How rows meet the experts of other ranks: all rows come to all ranks, or each goes to its experts' ranks only.

Both run on all ranks of the world together.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from xllm_platform.collectives import all_gather, all_reduce, all_to_all
from xllm_platform.parallel import ParallelState

from xllm_models.layers.experts import Experts


class ExpertLayer(Protocol):
    """What SparseMoe is to this module."""

    experts: Experts  # gives this rank's summand

    def router(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...  # weights, experts [T, k]
    def place(self, ids: torch.Tensor) -> torch.Tensor: ...
    def shared_part(self, hidden: torch.Tensor) -> torch.Tensor | None: ...


def by_gathering(
    layer: ExpertLayer, hidden: torch.Tensor, counts: tuple[int, ...], parallel: ParallelState
) -> torch.Tensor:
    """[T, N] -> [T, N]. `counts`: rows of each data-parallel rank, () where there is one. One sum over the world."""
    dp = parallel.dp
    if dp.size == 1:
        weights, ids = layer.router(hidden)
        out, shared = layer.experts(hidden, layer.place(ids), weights), layer.shared_part(hidden)
        return all_reduce(out if shared is None else out + shared, parallel.world)
    longest, count, begin = max(counts), counts[dp.rank], dp.rank * max(counts)
    rows = hidden[:count]
    gathered = all_gather(F.pad(rows, (0, 0, 0, longest - count)), dp)  # each rank's rows, padded to the longest
    weights, ids = layer.router(gathered)
    for rank, rows_there in enumerate(counts):
        ids[rank * longest + rows_there : (rank + 1) * longest] = -1
    out, shared = layer.experts(gathered, layer.place(ids), weights), layer.shared_part(rows)
    if shared is not None:
        out[begin : begin + count] += shared
    out = all_reduce(out, parallel.world)[begin : begin + count]
    return F.pad(out, (0, 0, 0, hidden.shape[0] - count))


def by_sending(
    layer: ExpertLayer, hidden: torch.Tensor, counts: tuple[int, ...], parallel: ParallelState
) -> torch.Tensor:
    """The same where every expert is whole on one rank. Tensor-parallel ranks share their rows' work evenly.

    A row goes once to each rank that has experts of it, with its choice, and comes back weighted and summed there.
    Waits for the device once: the sizes of the parts have to be known on the host.
    """
    tp, world = parallel.tp, parallel.world
    count = counts[parallel.dp.rank] if parallel.dp.size > 1 else hidden.shape[0]
    part = -(-count // tp.size)
    rows = hidden[:count][tp.rank * part : (tp.rank + 1) * part]  # may be fewer than `part`, or none
    weights, ids = layer.router(rows)
    ids = layer.place(ids)
    there = torch.zeros(rows.shape[0], world.size, dtype=torch.bool, device=rows.device)
    there.scatter_(1, torch.div(ids, layer.experts.slots, rounding_mode="floor").long(), True)
    source = there.t().nonzero()[:, 1]  # rows to send, by rank
    sizes = there.sum(dim=0)
    sent, received = torch.stack((sizes, all_to_all(sizes, world))).tolist()
    choice = torch.cat((ids[source], weights[source].view(torch.int32)), dim=1)
    choice = all_to_all(choice, world, sent, received)
    visitors = all_to_all(rows[source], world, sent, received)
    ids_here, weights_here = choice.chunk(2, dim=1)
    done = layer.experts(visitors, ids_here.contiguous(), weights_here.contiguous().view(torch.float32))
    back = all_to_all(done, world, received, sent)
    out = torch.zeros(part, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    out = out.index_add_(0, source, back.float()).to(hidden.dtype)
    out = all_gather(out, tp)[:count]
    shared = layer.shared_part(hidden[:count])
    if shared is not None:
        out = out + all_reduce(shared, tp)
    return F.pad(out, (0, 0, 0, hidden.shape[0] - count))
