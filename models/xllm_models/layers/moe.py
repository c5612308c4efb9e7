"""The sparse MLP: a router, experts of which each token visits a few, and experts that all tokens share.

All ranks of the world run it together, data-parallel ones too (see expert_exchange). To torch.compile the layer is one
opaque operator.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType
from weakref import WeakValueDictionary

import torch
from torch import nn
from xllm_platform.parallel import ParallelState

from xllm_models.config import ModelConfig
from xllm_models.layers.expert_exchange import by_gathering, by_sending
from xllm_models.layers.expert_names import ExpertNames, expert_names
from xllm_models.layers.expert_places import ExpertPlaces
from xllm_models.layers.experts import Experts
from xllm_models.layers.linear import ParallelLinear
from xllm_models.layers.mlp import GatedMLP
from xllm_models.layers.router import Router
from xllm_models.layers.sharding import ExpertSharding, Shard
from xllm_models.placement import Placement


@dataclass(slots=True)
class StepTokens:
    """What the layers of one model have to know of the step beside their rows; the model sets it before each."""

    counts: tuple[int, ...] = ()  # rows of each data-parallel rank; (): there is one rank


class SparseMoe(nn.Module):
    handle: torch.Tensor

    def __init__(
        self, config: ModelConfig, layer: int, parallel: ParallelState, *, ops: ModuleType, dtype: torch.dtype,
        device: torch.device, names: ExpertNames | None = None, step: StepTokens | None = None,
    ) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe, self.layer, self.parallel = config.moe, layer, parallel
        self.names, self.step = names or expert_names(config.model_type), step or StepTokens()
        self.router = Router(config.moe, config.hidden_size, ops=ops, dtype=dtype, device=device)
        sharding = ExpertSharding.of(config, parallel)
        self.experts = Experts(config, sharding, self.names, ops=ops, dtype=dtype, device=device)
        self.places = None  # None: experts stay where they are, and are their own places' numbers
        if parallel.experts.balanced:
            self.places = ExpertPlaces(config.moe.num_experts, parallel.ep.size, self.experts.slots, device)
        self.shared = self.shared_gate = None
        if config.moe.shared_intermediate_size:
            self.shared = GatedMLP(config, Shard.of(config, parallel.tp), config.moe.shared_intermediate_size, ops=ops,
                                   dtype=dtype, device=device)
        if config.moe.shared_gate:
            self.shared_gate = ParallelLinear(config.hidden_size, 1, False, ops=ops, dtype=dtype, device=device)
        number = next(_numbers)
        self.register_buffer("handle", torch.tensor(number, device="cpu"), persistent=False)
        _layers[number] = self

    def placements(self, prefix: str) -> dict[str, Placement]:
        """`prefix` ends with the block's name (see ExpertNames) and a dot."""
        names = self.names
        found = self.router.placements(f"{prefix}{names.router}", f"{prefix}{names.correction_bias}")
        found |= self.experts.placements(prefix)
        if self.shared is not None:
            found |= self.shared.placements(f"{prefix}{names.shared}.")
        if self.shared_gate is not None:
            gate = self.shared_gate
            found[f"{prefix}{names.shared_gate}.weight"] = Placement(gate.weight, (1, gate.in_features))
        return found

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, N] -> [T, N]. Overwrites nothing."""
        if torch.compiler.is_compiling():
            return torch.ops.xllm_models.moe(hidden, self.handle)
        return self.compute(hidden)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        counts, parallel = self.step.counts, self.parallel
        assert parallel.dp.size == max(1, len(counts)), "each data-parallel rank has to say how many rows it has"
        if parallel.experts.all_to_all and parallel.world.size > 1:
            return by_sending(self, hidden, counts, parallel)
        return by_gathering(self, hidden, counts, parallel)

    def place(self, ids: torch.Tensor) -> torch.Tensor:
        """Experts -> places, [T, k] int32; -1 is nobody's."""
        return ids if self.places is None else self.places(ids)

    def shared_part(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """This rank's summand of the shared experts' result, [T, N]; None: there are none."""
        if self.shared is None:
            return None
        out = self.shared.partial(hidden)
        return out if self.shared_gate is None else out * torch.sigmoid(self.shared_gate(hidden))


_numbers = itertools.count()
_layers: WeakValueDictionary[int, SparseMoe] = WeakValueDictionary()

_library = torch.library.Library("xllm_models", "FRAGMENT")
_library.define("moe(Tensor hidden, Tensor handle) -> Tensor")


def _moe(hidden: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """A number in a tensor stands for the layer, so that one trace serves all depths."""
    return _layers[int(handle)].compute(hidden)


def _moe_shape(hidden: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


_library.impl("moe", _moe, "CompositeExplicitAutograd")
torch.library.register_fake("xllm_models::moe", _moe_shape, lib=_library)
