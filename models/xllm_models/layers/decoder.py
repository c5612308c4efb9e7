"""One transformer layer: attention and an MLP, each behind an RMS norm, with the residual carried beside.

The configuration says whether the MLP is a gated or a sparse one, and what a family adds (head norms, fused matrices in
the checkpoint, sinks). A subclass says what its norms are called in the checkpoint (`norm_names`). Everything that
differs between layers of a kind is in buffers, not in Python values, so that torch.compile traces a kind once for all
depths. Knows the attention backend by its interface only, and no checkpoint but its names.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from weakref import WeakValueDictionary

import torch
from torch import nn
from xllm_platform.parallel import ParallelState

from xllm_models.attention.base import AttentionBackend, LayerAttention
from xllm_models.config import ModelConfig
from xllm_models.layers.attention_cut import AttentionCut
from xllm_models.layers.latent_attention import LatentAttention
from xllm_models.layers.linear import FusedColumnLinear, RowLinear, empty_parameter
from xllm_models.layers.mlp import GatedMLP
from xllm_models.layers.moe import SparseMoe, StepTokens
from xllm_models.layers.norm import RMSNorm, norm_placement, norm_weight
from xllm_models.layers.rotary import halves_of_pairs
from xllm_models.layers.sharding import Shard
from xllm_models.placement import Placement


class Attention(nn.Module):
    """Projections, head norms, rotation, and the backend's attention."""

    handle: torch.Tensor

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, **kind: object) -> None:
        super().__init__()
        self.ops: ModuleType = kind["ops"]  # type: ignore[assignment]
        self.num_heads, self.num_kv_heads, self.head_dim = shard.num_heads, shard.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.backend: AttentionBackend | None = None
        self.cut: AttentionCut | None = None
        group = shard.group
        self.qkv = FusedColumnLinear(config.hidden_size, [
            ("q_proj", config.num_heads * config.head_dim, group.rank, group.size),
            ("k_proj", config.num_kv_heads * config.head_dim, shard.kv_index, shard.kv_count),
            ("v_proj", config.num_kv_heads * config.head_dim, shard.kv_index, shard.kv_count),
        ], config.attention_bias, stored_as="qkv_proj" if config.qkv_fused else "", **kind)  # type: ignore[arg-type]
        self.output = RowLinear(config.num_heads * config.head_dim, config.hidden_size, config.attention_output_bias,
                                group, **kind)  # type: ignore[arg-type]
        self.norm, self.q_norm, self.k_norm = config.norm, None, None
        dtype, device = self.qkv.weight.dtype, self.qkv.weight.device
        if config.qk_norm:
            self.q_norm = norm_weight(config.head_dim, config.norm, dtype, device)
            self.k_norm = norm_weight(config.head_dim, config.norm, dtype, device)
        self.sinks = None  # [H] float32: what the backends take
        if config.attention_sinks:
            self.sinks = empty_parameter((self.num_heads,), torch.float32, device)
            self.all_sinks = config.num_heads
        self.group, windows = group, config.layer_sliding_windows
        self.spec = LayerAttention(
            layer, config.attention_scale or config.head_dim**-0.5, windows[layer] if windows else 0,
            softcap=config.attention_softcap, sinks=self.sinks)
        self.rotary_dim = int(config.head_dim * config.rope.partial_rotary_factor) if config.rope_interleaved else 0
        number = next(_numbers)
        self.register_buffer("handle", torch.tensor(number, device="cpu"), persistent=False)
        _layers[number] = self

    def placements(self, prefix: str) -> dict[str, Placement]:
        found = self.qkv.placements(prefix)
        if self.rotary_dim:  # pairs become halves, which leaves every product of a query and a key as it is
            rotated = [name for name in found if name.split(".")[-2] in ("q_proj", "k_proj")]
            found |= {name: halves_of_pairs(found[name], self.head_dim, self.rotary_dim) for name in rotated}
        if self.q_norm is not None and self.k_norm is not None:
            found[f"{prefix}q_norm.weight"] = norm_placement(self.q_norm, self.norm)
            found[f"{prefix}k_norm.weight"] = norm_placement(self.k_norm, self.norm)
        if self.sinks is not None:
            found[f"{prefix}sinks"] = Placement(self.sinks, (self.all_sinks,), (), 0, self.group.rank, self.group.size)
        return found | self.output.placements(f"{prefix}o_proj")

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        qkv = self.ops.rotary(self.qkv(x), positions, cos_sin, self.num_heads, self.num_kv_heads, self.q_norm,
                              self.k_norm, self.eps)
        if torch.compiler.is_compiling():
            return self.output(torch.ops.xllm_models.attention(qkv, self.handle, self.attended_width))
        return self.output(self.attend(qkv) if self.cut is None else self.cut(self, qkv))

    @property
    def attended_width(self) -> int:
        return self.num_heads * self.head_dim

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [T, (H + 2K) * E], rotated -> [T, H * E]."""
        assert self.backend is not None, "bind_attention comes before the first forward"
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return self.backend.forward(self.spec, query, key, value)


class DecoderLayer(nn.Module):
    norm_names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # ours -> the checkpoint's
    input_norm: RMSNorm
    mlp_norm: RMSNorm

    def __init__(
        self, config: ModelConfig, layer: int, shard: Shard, parallel: ParallelState, step: StepTokens, **kind: object
    ) -> None:
        super().__init__()
        attention = Attention if config.mla is None else LatentAttention
        self.attention = attention(config, layer, shard, **kind)
        self.mlp: GatedMLP | SparseMoe
        self.mlp_name = "mlp"
        if config.moe is not None and config.moe.layers[layer]:
            self.mlp = SparseMoe(config, layer, parallel, step=step, **kind)  # type: ignore[arg-type]
            self.mlp_name = self.mlp.names.block
        else:
            self.mlp = GatedMLP(config, shard, **kind)  # type: ignore[arg-type]
        for name in self.norm_names:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm, **kind))  # type: ignore[arg-type]

    def placements(self, prefix: str) -> dict[str, Placement]:
        found = self.attention.placements(f"{prefix}self_attn.")
        found |= self.mlp.placements(f"{prefix}{self.mlp_name}.")
        for name, stored in self.norm_names.items():
            found |= getattr(self, name).placements(f"{prefix}{stored}")
        return found

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden and residual [T, hidden] -> the same; their sum is the layer's output."""
        normed, residual = self.input_norm(hidden, residual)
        hidden, residual = self.mlp_norm(self.attention(normed, positions, cos_sin), residual)
        return self.mlp(hidden), residual


class SandwichLayer(DecoderLayer):
    """With a norm behind each part too, before the residual is added."""

    attention_output_norm: RMSNorm
    mlp_output_norm: RMSNorm

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm(hidden, residual)
        attended = self.attention_output_norm(self.attention(normed, positions, cos_sin), None)[0]
        hidden, residual = self.mlp_norm(attended, residual)
        return self.mlp_output_norm(self.mlp(hidden), None)[0], residual


_numbers = itertools.count()
_layers: WeakValueDictionary[int, Attention] = WeakValueDictionary()


_library = torch.library.Library("xllm_models", "FRAGMENT")
_library.define("attention(Tensor qkv, Tensor handle, SymInt width) -> Tensor")


def _attention(qkv: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:
    """Writes the layer's cache, which no traced code reads. A number in a tensor stands for the layer."""
    return _layers[int(handle)].attend(qkv)


def _attention_shape(qkv: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], width)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("xllm_models::attention", _attention_shape, lib=_library)
