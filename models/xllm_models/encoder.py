"""BERT and its relatives: post-norm encoders with learned positions, whose tokens see the whole of their sequence.

Sequences lie packed behind each other, without padding. The second text of a pair may have embeddings of its own: its
tokens are then other tokens, with ids from `vocab_size` on, so that a prompt is a list of numbers here too. Families
differ in what the checkpoint calls its tensors (`_Names`), in where positions begin, and MPNet in a bias by distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from xllm_platform.parallel import ParallelState

from xllm_models.attention.base import AttentionSpec, PagedBackend
from xllm_models.attention.encoder_attention import EncoderAttention
from xllm_models.config import ModelConfig
from xllm_models.config_keys import ModelConfigError
from xllm_models.forward_input import ForwardInput
from xllm_models.layers.linear import FusedColumnLinear, ParallelLinear, RowLinear, empty_parameter
from xllm_models.placement import Placement

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu,
}
_FARTHEST = 128  # distance that MPNet's last bucket begins at; no checkpoint says otherwise


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family calls its tensors; those of a layer behind `layers` and its number."""

    layers: str = "encoder.layer."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


_NAMES = {
    "bert": _Names(), "roberta": _Names(),
    "distilbert": _Names("transformer.layer.", "attention.q_lin", "attention.k_lin", "attention.v_lin",
                         "attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
    "mpnet": _Names(query="attention.attn.q", key="attention.attn.k", value="attention.attn.v",
                    output="attention.attn.o", attention_norm="attention.LayerNorm"),
}


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = empty_parameter((width,), dtype, device)
        self.bias = empty_parameter((width,), dtype, device)

    def placements(self, name: str) -> dict[str, Placement]:
        return {f"{name}.weight": Placement(self.weight, (self.width,)),
                f"{name}.bias": Placement(self.bias, (self.width,))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, eps: float, names: _Names, *, ops: ModuleType, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        width, inner, group = config.hidden_size, config.intermediate_size, ParallelState.single().tp
        self.num_heads, self.head_dim, self.names = config.num_heads, config.head_dim, names
        self.activation = _ACTIVATIONS[config.hidden_act]
        kind = {"ops": ops, "dtype": dtype, "device": device}
        self.qkv = FusedColumnLinear(width, [(name, width, 0, 1) for name in (names.query, names.key, names.value)],
                                     True, **kind)  # type: ignore[arg-type]
        self.output = RowLinear(width, width, True, group, **kind)  # type: ignore[arg-type]
        self.attention_norm = LayerNorm(width, eps, dtype, device)
        self.up = RowLinear(width, inner, True, group, **kind)  # type: ignore[arg-type]
        self.down = RowLinear(inner, width, True, group, **kind)  # type: ignore[arg-type]
        self.mlp_norm = LayerNorm(width, eps, dtype, device)

    def placements(self, prefix: str) -> dict[str, Placement]:
        found = self.qkv.placements(prefix)
        for part in ("output", "attention_norm", "up", "down", "mlp_norm"):
            found |= getattr(self, part).placements(prefix + getattr(self.names, part))
        return found

    def forward(self, x: torch.Tensor, backend: EncoderAttention, bias: Callable[[int], torch.Tensor] | None
                ) -> torch.Tensor:
        """x [T, hidden] -> the same."""
        query, key, value = self.qkv(x).unflatten(1, (3, self.num_heads, self.head_dim)).unbind(1)  # [T, H, E]
        attended = backend.forward(query, key, value, self.head_dim**-0.5, bias)
        x = self.attention_norm(x + self.output(attended))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))


class EncoderModel(nn.Module):
    rotary_switch = 0
    lora = None  # it takes no adapters
    attention_needs: frozenset[str] = frozenset()

    def __init__(
        self, config: ModelConfig, *, ops: ModuleType, dtype: torch.dtype, device: torch.device,
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert config.encoder is not None
        if config.hidden_act not in _ACTIVATIONS:
            raise ModelConfigError(f'hidden_act "{config.hidden_act}" is not supported. Supported: '
                                        f"{', '.join(sorted(_ACTIVATIONS))}.")
        self.config, self.encoder, self.dtype, self.device = config, config.encoder, dtype, device
        self.storage_dtype = storage_dtype or dtype
        e, width = config.encoder, config.hidden_size
        self.words = empty_parameter((config.vocab_size, width), dtype, device)
        self.positions = empty_parameter((e.num_positions, width), dtype, device)
        self.types = empty_parameter((e.num_types, width), dtype, device) if e.num_types else None
        self.norm = LayerNorm(width, e.norm_eps, dtype, device)
        self.distances = None
        if e.relative_buckets:
            self.distances = empty_parameter((e.relative_buckets, config.num_heads), dtype, device)
        names = _NAMES[e.family]
        self.layers = nn.ModuleList(EncoderLayer(config, e.norm_eps, names, ops=ops, dtype=dtype, device=device)
                                    for _ in range(config.num_layers))
        self.backend = EncoderAttention()
        self._biases: dict[int, torch.Tensor] = {}

    def placements(self) -> dict[str, Placement]:
        """By the names of the family's bare model, such as BertModel."""
        tables = {"embeddings.word_embeddings.weight": self.words,
                  "embeddings.position_embeddings.weight": self.positions}
        if self.types is not None:
            tables["embeddings.token_type_embeddings.weight"] = self.types
        if self.distances is not None:
            tables["encoder.relative_attention_bias.weight"] = self.distances
        found = {name: Placement(table, tuple(table.shape)) for name, table in tables.items()}
        found |= self.norm.placements("embeddings.LayerNorm")
        for i, layer in enumerate(self.layers):
            found |= layer.placements(f"{_NAMES[self.encoder.family].layers}{i}.")  # type: ignore[operator]
        return found

    def allocate_weights(self) -> None:
        """Plain, uninitialised matrices again where `finalize_weights` dropped them; load and finalize after it."""
        for module in self.modules():
            if isinstance(module, ParallelLinear):
                module.allocate()

    def finalize_weights(self) -> None:
        """Once, after loading: round to the storage dtype if it is narrower, and pack matrices one at a time."""
        self._biases.clear()  # of the weights that were there before
        if self.storage_dtype != self.dtype:
            for parameter in self.parameters():
                parameter.data.copy_(parameter.data.to(self.storage_dtype))
        for module in self.modules():
            if isinstance(module, ParallelLinear):
                module.finalize()

    def attention_spec(self, block_size: int) -> AttentionSpec:
        c = self.config
        return AttentionSpec(c.num_layers, c.num_heads, c.num_heads, c.head_dim, block_size, self.dtype, self.device)

    def bind_attention(self, backend: PagedBackend) -> None:
        assert isinstance(backend, EncoderAttention)
        self.backend = backend

    def reserve_positions(self, max_positions: int) -> None:
        """They are the checkpoint's."""

    def forward(self, input: ForwardInput) -> torch.Tensor:
        """-> [T, hidden]"""
        x = self.norm(self._embed(input.token_ids, input.positions))
        bias = None if self.distances is None else self._distance_bias
        for layer in self.layers:
            x = layer(x, self.backend, bias)
        return x

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] both -> [T, hidden]; ids of type t are t * vocab_size and up."""
        size = self.config.vocab_size
        x = F.embedding(token_ids % size, self.words)
        x = x + F.embedding(positions + self.encoder.first_position, self.positions)
        return x if self.types is None else x + F.embedding(token_ids // size, self.types)

    def _distance_bias(self, length: int) -> torch.Tensor:
        """[H, length, length]; made once for the longest sequence yet, and cut."""
        known = self._biases.get(0)
        if known is None or known.shape[-1] < length:
            assert self.distances is not None
            size = max(length, 64 if known is None else 2 * known.shape[-1])
            buckets = distance_buckets(size, self.distances.shape[0], self.device)
            known = self._biases[0] = F.embedding(buckets, self.distances).permute(2, 0, 1).contiguous()
        return known[:, :length, :length]


def distance_buckets(length: int, buckets: int, device: torch.device) -> torch.Tensor:
    """[length, length] int64: which bias a query (row) has for a key (column).

    Half of the buckets are for keys behind the query. In each half the near distances have one each and the far ones
    share them logarithmically: Raffel et al., Exploring the Limits of Transfer Learning (T5), section 2.1.
    """
    at = torch.arange(length, device=device)
    offset = at[None, :] - at[:, None]  # of the key from the query
    half = buckets // 2
    near = half // 2
    distance = offset.abs()
    scale = torch.log(distance.float().clamp(min=1) / near) / math.log(_FARTHEST / near) * (half - near)
    far = (near + scale.long()).clamp(max=half - 1)
    return torch.where(distance < near, distance, far) + (offset > 0).long() * half


def checkpoint_prefix(names: Mapping[str, object]) -> str:
    """What a checkpoint with a head puts before the names of the bare model, such as "bert."."""
    end = "embeddings.word_embeddings.weight"
    return next((name.removesuffix(end) for name in names if name.endswith(end)), "")
