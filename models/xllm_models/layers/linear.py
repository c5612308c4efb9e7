"""Linear layers cut over tensor-parallel ranks, and where their checkpoint tensors go.

Column-parallel layers split outputs, row-parallel ones split inputs and sum over ranks; fused layers hold several
checkpoint matrices below each other. Weights are allocated without being initialised. `finalize()` exchanges the
plain weight for the operator set's packed form, if it has one; `allocate()` brings an empty plain one back, to be
loaded again. Weights that lie in memory of somebody's (see weight_memory) stay plain. Knows no architecture.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import nn
from xllm_platform.collectives import all_reduce
from xllm_platform.parallel import Group

from xllm_models.placement import Placement
from xllm_models.weight_memory import empty_weight, weights_stay

if TYPE_CHECKING:
    from xllm_models.layers.lora import LinearLora


class ParallelLinear(nn.Module):
    """y = x W^T + b on this rank's part. in_features and out_features are this rank's."""

    handle: torch.Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, ops: ModuleType, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.ops = in_features, out_features, ops
        self.weight = empty_parameter((out_features, in_features), dtype, device)
        self.bias = empty_parameter((out_features,), dtype, device) if bias else None
        self.packed: torch.Tensor | None = None
        self.stays_plain = weights_stay()
        self.adds_bias = True
        self.lora: LinearLora | None = None  # a side path with adapters
        number = next(_numbers)
        self.register_buffer("handle", torch.tensor(number, device="cpu"), persistent=False)
        _layers[number] = self

    def finalize(self) -> None:
        if self.stays_plain:
            return
        self.packed = self.ops.pack_linear(self.weight)
        if self.packed is not None:
            self.weight.data = self.weight.data.new_empty(0)

    def allocate(self) -> None:
        """A plain weight to load into, after `finalize` has dropped it; else that is there, and graphs know where."""
        if self.packed is None:
            return
        self.packed = None
        self.weight.data = self.weight.data.new_empty(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and self.opaque:
            # A packed matrix means nothing to the compiler, and one compilation serves the layers of all depths: so
            # the traced code holds no matrix, only a tensor with this layer's number.
            return torch.ops.xllm_models.linear(x, self.handle, self.out_features)
        return self.compute(x)

    @property
    def opaque(self) -> bool:
        """Whether the compiler must not look inside."""
        return self.packed is not None or self.lora is not None

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The whole of `forward`, eagerly."""
        return self.apply_weight(x)

    def apply_weight(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.adds_bias else None
        if self.packed is not None:
            y = self.ops.linear_packed(x, self.packed, bias)
        else:
            y = self.ops.linear(x, self.weight, bias)
        if self.lora is not None and self.lora.step.own is not None:
            return self.lora.add(y, x)
        return y


class FusedColumnLinear(ParallelLinear):
    """Several matrices in one: `parts` of (name, rows in the checkpoint, shard index, shard count).

    `stored_as`: the name of the one matrix that a checkpoint holds instead, all parts below each other.
    """

    def __init__(
        self, in_features: int, parts: list[tuple[str, int, int, int]], bias: bool, *, stored_as: str = "",
        ops: ModuleType, dtype: torch.dtype, device: torch.device,
    ) -> None:
        super().__init__(in_features, sum(rows // count for _, rows, _, count in parts), bias, ops=ops, dtype=dtype,
                         device=device)
        self.parts, self.stored_as = parts, stored_as

    def placements(self, prefix: str) -> dict[str, Placement]:
        if self.stored_as:
            return self._one_matrix(f"{prefix}{self.stored_as}")
        found, begin = {}, 0
        for name, rows, index, count in self.parts:
            dest = (slice(begin, begin + rows // count),)
            found[f"{prefix}{name}.weight"] = Placement(self.weight, (rows, self.in_features), dest, 0, index, count)
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = Placement(self.bias, (rows,), dest, 0, index, count)
            begin = dest[0].stop
        return found

    def _one_matrix(self, name: str) -> dict[str, Placement]:
        sections, rows = tuple(part[1:] for part in self.parts), sum(part[1] for part in self.parts)
        whole = (rows, self.in_features)
        found = {f"{name}.weight": Placement(self.weight, whole, shard_dim=0, sections=sections)}
        if self.bias is not None:
            found[f"{name}.bias"] = Placement(self.bias, (rows,), shard_dim=0, sections=sections)
        return found


class RowLinear(ParallelLinear):
    """Inputs split over the group, outputs summed over it; the first rank adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, group: Group, *, ops: ModuleType, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features // group.size, out_features, bias, ops=ops, dtype=dtype, device=device)
        self.group, self.adds_bias = group, group.rank == 0

    def placements(self, name: str) -> dict[str, Placement]:
        whole = (self.out_features, self.in_features * self.group.size)
        found = {f"{name}.weight": Placement(self.weight, whole, (), 1, self.group.rank, self.group.size)}
        if self.bias is not None:
            found[f"{name}.bias"] = Placement(self.bias, (self.out_features,))
        return found

    @property
    def opaque(self) -> bool:
        return self.packed is not None or self.lora is not None or self.group.size > 1

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.partial(x), self.group)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand; for callers that no compiler traces."""
        return self.apply_weight(x)


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(empty_weight(shape, dtype, device), requires_grad=False)


_numbers = itertools.count()
_layers: WeakValueDictionary[int, ParallelLinear] = WeakValueDictionary()


# Defined through Library and not custom_op, whose wrappers cost more than a small product.
_library = torch.library.Library("xllm_models", "FRAGMENT")
_library.define("linear(Tensor x, Tensor handle, SymInt out_features) -> Tensor")


def _linear(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return _layers[int(handle)].compute(x)


def _linear_shape(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("xllm_models::linear", _linear_shape, lib=_library)
