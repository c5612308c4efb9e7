"""Low-rank adapters beside linear layers: y += scale * B (A x), another A and B for each row of a step.

Adapters lie in slots, of which every linear layer has the same number; a row names its adapter's slot, or -1. The side
path has shapes that do not depend on which rows use which slot, and asks the host nothing, so a captured graph may
contain it: all slots' A are one matrix, a mask leaves of the product what belongs to each row's slot, and all slots' B
are one matrix again. A step in which no row has an adapter skips it. Column-parallel layers split B, row-parallel
ones A, whose partial results the layer's own sum over ranks adds up. Method: Hu et al., arXiv 2106.09685; batches with
several adapters: Chen et al., arXiv 2310.18547.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from xllm_models.layers.embedding import LogitsHead
from xllm_models.layers.linear import ParallelLinear
from xllm_models.layers.moe import SparseMoe
from xllm_models.placement import Placement
from xllm_models.weights.loader import region_of

if TYPE_CHECKING:
    from xllm_models.llama import LlamaForCausalLM

Matrices = tuple[torch.Tensor, torch.Tensor]  # A [rank, in], B [out, rank]


@dataclass(slots=True)
class LoraStep:
    """What all layers must know of the step that runs."""

    own: torch.Tensor | None = None  # [T, 1, slots * rank] bool: what is of a row's slot; None: no row has an adapter


@dataclass(slots=True, frozen=True)
class LoraTarget:
    """One matrix of the checkpoint, as part of a linear layer of this rank."""

    layer: ParallelLinear
    part: int  # among the layer's
    placement: Placement  # of the matrix

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the whole matrix."""
        rows, columns = self.placement.shape
        return rows, columns

    def cut(self, name: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
        """This rank's part of A [rank, in] and B [out, rank], in the order that the layer's rows have."""
        rows, columns = region_of(name, self.placement)
        b, a = _select(b, rows), _select(a.t(), columns).t()
        order = self.placement.order
        if order is not None:
            b = b.reshape(-1, order.numel(), b.shape[1])[:, order].reshape(b.shape)
        return a.contiguous(), b.contiguous()


def _select(tensor: torch.Tensor, rows: slice | tuple[slice, ...]) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else torch.cat([tensor[part] for part in rows])


class LinearLora(nn.Module):
    """The side path of one linear layer: for each of its parts and each slot an A and a B, all 0 where a slot is empty.

    `parts`: first row and rows of each, in the layer's output.
    """

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, layer: ParallelLinear, parts: Sequence[tuple[int, int]], slots: int, rank: int, step: LoraStep,
                 dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts, self.slots, self.rank, self.step = tuple(parts), slots, rank, step
        width = sum(rows for _, rows in parts)
        # [parts * slots * rank, in] and [slots * rank, out of all parts]
        a = torch.zeros(len(parts) * slots * rank, layer.in_features, dtype=dtype, device=device)
        self.register_buffer("a", a, persistent=False)
        b = torch.zeros(slots * rank, width, dtype=dtype, device=device)
        self.register_buffer("b", b, persistent=False)

    def put(self, slot: int, part: int, matrices: Matrices | None) -> None:
        """A [r, in] and B [out, r] of one adapter, r at most `rank`, B scaled; None: the adapter has none here."""
        first = (part * self.slots + slot) * self.rank
        a, b = self.a[first : first + self.rank], self._b(part)[slot * self.rank : (slot + 1) * self.rank]
        used = 0
        if matrices is not None:
            used = matrices[0].shape[0]
            a[:used].copy_(matrices[0])
            b[:used].copy_(matrices[1].t())
        a[used:] = 0
        b[used:] = 0

    def _b(self, part: int) -> torch.Tensor:
        """[slots * rank, rows of the part]"""
        before = sum(rows for _, rows in self.parts[:part])
        return self.b[:, before : before + self.parts[part][1]]

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [T, out] plus what the rows' adapters make of x [T, in]; in place."""
        own = self.step.own
        assert own is not None
        low = torch.mm(x, self.a.t()).view(x.shape[0], len(self.parts), -1)
        low = torch.where(own, low, torch.zeros((), dtype=low.dtype, device=low.device))  # not times 0: of inf is nan
        for part, (begin, rows) in enumerate(self.parts):
            y[:, begin : begin + rows].addmm_(low[:, part], self._b(part))
        return y

    def add_plainly(self, y: torch.Tensor, x: torch.Tensor, token_slots: torch.Tensor) -> torch.Tensor:
        """What `add` must equal: adapter by adapter, part by part. token_slots [T]."""
        y = y.clone()
        for slot in range(self.slots):
            mine = token_slots == slot
            for part, (begin, rows) in enumerate(self.parts):
                first = (part * self.slots + slot) * self.rank
                a, b = self.a[first : first + self.rank], self._b(part)[slot * self.rank : (slot + 1) * self.rank]
                y[mine, begin : begin + rows] += (x[mine] @ a.t()) @ b
        return y


class LoraSlots:
    """A model's adapter slots, over all of its layers. `model.lora` is this once it is attached."""

    def __init__(self, targets: Mapping[str, LoraTarget], layers: Sequence[LinearLora], slots: int, rank: int,
                 step: LoraStep, device: torch.device) -> None:
        self.targets, self.slots, self.rank = targets, slots, rank
        self._layers, self._step = layers, step
        self._slot_of_column = torch.arange(slots, device=device).repeat_interleave(rank)  # [slots * rank]

    @property
    def nbytes(self) -> int:
        return sum(layer.a.nbytes + layer.b.nbytes for layer in self._layers)

    def put(self, slot: int, matrices: Mapping[str, Matrices]) -> None:
        """An adapter's matrices of this rank by target, into a slot, over what was there."""
        for name, target in self.targets.items():
            lora = target.layer.lora
            assert lora is not None
            lora.put(slot, target.part, matrices.get(name))

    def begin(self, token_slots: torch.Tensor | None) -> None:
        """Before each forward pass. token_slots [T] int64; None: no row has an adapter."""
        own = None if token_slots is None else (token_slots[:, None, None] == self._slot_of_column)
        self._step.own = own


def find_targets(model: LlamaForCausalLM) -> dict[str, LoraTarget]:
    """What an adapter may change, by the checkpoint's names of modules: linear layers of attention and dense MLPs."""
    inside_experts = {id(inner) for module in model.modules() if isinstance(module, SparseMoe)
                      for inner in module.modules()}
    layers = {id(layer.weight): layer for layer in model.modules() if isinstance(layer, ParallelLinear)
              and not isinstance(layer, LogitsHead) and id(layer) not in inside_experts}
    found: dict[str, LoraTarget] = {}
    parts: dict[int, int] = {}
    for name, placement in model.placements().items():
        layer = layers.get(id(placement.param))
        if layer is not None:
            part = parts[id(layer)] = parts.get(id(layer), -1) + 1
            found[name.removesuffix(".weight")] = LoraTarget(layer, part, placement)
    return found


def attach_lora(model: LlamaForCausalLM, slots: int, rank: int) -> LoraSlots:
    """Give every linear layer that an adapter may change a side path with so many slots of at most this rank."""
    targets, step = find_targets(model), LoraStep()
    by_layer: dict[ParallelLinear, list[LoraTarget]] = {}
    for target in targets.values():
        by_layer.setdefault(target.layer, []).append(target)
    made = []
    for layer, own in by_layer.items():
        parts = [_rows(target) for target in own]
        layer.lora = LinearLora(layer, parts, slots, rank, step, model.dtype, model.device)
        made.append(layer.lora)
    model.lora = LoraSlots(targets, made, slots, rank, step, model.device)
    return model.lora


def _rows(target: LoraTarget) -> tuple[int, int]:
    """First row and rows of a matrix in its layer's output."""
    dest = target.placement.dest
    if not dest:
        return 0, target.layer.out_features
    rows = dest[0]
    assert isinstance(rows, slice)
    return rows.start, rows.stop - rows.start
