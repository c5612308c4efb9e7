"""This rank's experts: their matrices one above the other, and where each comes from in the checkpoint.

Expert-parallel ranks hold different experts, the ranks of one moe_tp group equal slices of the same ones. What
`forward` returns is this rank's summand; who adds them up is the layer's business (see layers.moe).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from xllm_models.config import ModelConfig
from xllm_models.layers.expert_names import ExpertNames
from xllm_models.layers.linear import empty_parameter
from xllm_models.layers.sharding import ExpertSharding
from xllm_models.placement import Placement
from xllm_models.weights import mxfp4

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Pending:
    """Which of a quantized matrix's two tensors is there already."""

    filled: bool = False  # the elements, unscaled, in the parameter
    scales: torch.Tensor | None = None


class Experts(nn.Module):
    def __init__(
        self, config: ModelConfig, sharding: ExpertSharding, names: ExpertNames, *, ops: ModuleType,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        super().__init__()
        assert config.moe is not None
        self.sharding, self.names, self.ops = sharding, names, ops
        self.hidden_size, self.num_experts, self.width = config.hidden_size, config.moe.num_experts, (
            config.moe.intermediate_size)
        self.quantized = config.quantization == "mxfp4"
        self.activation = config.moe.activation or ops.ACTIVATIONS[config.hidden_act]
        self.slots = sharding.count + sharding.spare  # places for experts a rank; spare ones come last, empty
        self.first_slot = sharding.ep.rank * self.slots  # physical number of the first place here
        count, width, bias = self.slots, sharding.width, config.moe.bias
        self.gate_up = empty_parameter((count, 2 * width, self.hidden_size), dtype, device)
        self.down = empty_parameter((count, self.hidden_size, width), dtype, device)
        self.gate_up_bias = empty_parameter((count, 2 * width), dtype, device) if bias else None
        adds_bias = bias and sharding.moe_tp.rank == 0  # or the sum over moe_tp would have it several times
        self.down_bias = empty_parameter((count, self.hidden_size), dtype, device) if adds_bias else None

        for matrix in self.matrices():
            matrix[sharding.count :].zero_()

    def matrices(self) -> list[torch.Tensor]:
        """All that belongs to experts, by place: [slots, ...] each."""
        found = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return [parameter.data for parameter in found if parameter is not None]

    def placements(self, prefix: str) -> dict[str, Placement]:
        """`prefix` ends with the block's name and a dot. Other ranks' experts are not named: nobody reads them."""
        prefix = f"{prefix}{self.names.experts}."
        return self._stacked(prefix) if self.names.stacked else self._one_by_one(prefix)

    def _one_by_one(self, prefix: str) -> dict[str, Placement]:
        names, part = self.names, self.sharding.moe_tp
        width, hidden, found = self.sharding.width, self.hidden_size, {}
        for local in range(self.sharding.count):
            expert = f"{prefix}{self.sharding.first + local}."
            for name, begin in ((names.gate, 0), (names.up, width)):
                dest = (local, slice(begin, begin + width))
                found[f"{expert}{name}.weight"] = Placement(self.gate_up, (self.width, hidden), dest, 0, part.rank,
                                                            part.size)
                if self.gate_up_bias is not None:
                    found[f"{expert}{name}.bias"] = Placement(self.gate_up_bias, (self.width,), dest, 0, part.rank,
                                                              part.size)
            found[f"{expert}{names.down}.weight"] = Placement(self.down, (hidden, self.width), (local,), 1, part.rank,
                                                              part.size)
            if self.down_bias is not None:
                found[f"{expert}{names.down}.bias"] = Placement(self.down_bias, (hidden,), (local,))
        return found

    def _stacked(self, prefix: str) -> dict[str, Placement]:
        names, ep, hidden = self.names, self.sharding.ep, self.hidden_size
        outer, inner = (self.num_experts, 2 * self.width), (self.num_experts, self.width)
        gate_up = (outer[0], hidden, outer[1]) if names.transposed else (*outer, hidden)
        down = (*inner, hidden) if names.transposed else (inner[0], hidden, inner[1])

        def placed(param: torch.Tensor, shape: tuple[int, ...], ours: Convert) -> Placement:
            def store(tensor: torch.Tensor) -> None:
                param.data[: self.sharding.count].copy_(ours(tensor))

            return Placement(param, shape, (), 0, ep.rank, ep.size, store=store)

        if self.quantized:
            found = self._mxfp4(f"{prefix}{names.gate_up}", self.gate_up, (*outer, hidden), self._our_rows)
            found |= self._mxfp4(f"{prefix}{names.down}", self.down, (inner[0], hidden, inner[1]), self._our_columns)
        else:
            found = {
                f"{prefix}{names.gate_up}": placed(self.gate_up, gate_up, self._our_gate_up),
                f"{prefix}{names.down}": placed(self.down, down, self._our_down),
            }
        if self.gate_up_bias is not None:
            found[f"{prefix}{names.gate_up}_bias"] = placed(self.gate_up_bias, outer, self._our_rows)
        if self.down_bias is not None:
            found[f"{prefix}{names.down}_bias"] = placed(self.down_bias, (self.num_experts, hidden), lambda t: t)
        return found

    def _mxfp4(
        self, name: str, param: nn.Parameter, shape: tuple[int, int, int], ours: Convert
    ) -> dict[str, Placement]:
        """Elements go into the parameter when they come, and are multiplied as soon as their scales are there too."""
        ep, (experts, rows, columns), kept = self.sharding.ep, shape, Pending()

        def scale(scales: torch.Tensor) -> None:
            for expert in range(self.sharding.count):  # one at a time: factors are as large as the matrix
                param.data[expert].mul_(ours(mxfp4.factors(scales[expert : expert + 1]))[0].to(param.device))

        def store_blocks(blocks: torch.Tensor) -> None:
            for expert in range(self.sharding.count):
                param.data[expert].copy_(ours(mxfp4.unscaled(blocks[expert : expert + 1]))[0])
            if kept.scales is not None:
                scale(kept.scales)
            kept.scales, kept.filled = None, kept.scales is None

        def store_scales(scales: torch.Tensor) -> None:
            if kept.filled:
                scale(scales)
            kept.scales, kept.filled = None if kept.filled else scales.clone(), False

        groups = columns // mxfp4.BLOCK
        return {
            f"{name}_blocks": Placement(param, (experts, rows, groups, mxfp4.BLOCK // 2), (), 0, ep.rank, ep.size,
                                        store=store_blocks),
            f"{name}_scales": Placement(param, (experts, rows, groups), (), 0, ep.rank, ep.size, store=store_scales),
        }

    def _our_gate_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._our_rows(tensor.transpose(1, 2) if self.names.transposed else tensor)

    def _our_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[e, 2I, ...] as the checkpoint orders it -> gates then ups of this rank's part, [e, 2I/n, ...]."""
        if self.names.interleaved:
            gate, up = tensor[:, ::2], tensor[:, 1::2]
        else:
            gate, up = tensor.chunk(2, dim=1)
        width, part = self.sharding.width, self.sharding.moe_tp.rank
        return torch.cat([half[:, part * width : (part + 1) * width] for half in (gate, up)], dim=1)

    def _our_down(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._our_columns(tensor.transpose(1, 2) if self.names.transposed else tensor)

    def _our_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(2, self.sharding.moe_tp.rank * self.sharding.width, self.sharding.width)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, N], places [T, k] int32, weights [T, k] float32 -> [T, N]; places on other ranks give nothing."""
        return self.ops.moe_experts(x, ids, weights, self.gate_up, self.down, self.activation, self.first_slot,
                                    self.gate_up_bias, self.down_bias)
