"""Multi-head latent attention (MLA): low-rank projections around a backend that caches one latent a token.

Queries are projected at once or through a latent of their own; keys and values of all heads come from one normed
latent and one rotated key part that they share. Rows are stored so that a head's query is [rotated, rest] and rotated
pairs are (i, i + half), whatever the checkpoint's order, which leaves every product as it is. Knows the backend by
its interface only.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from weakref import WeakValueDictionary

import torch
from torch import nn

from xllm_models.attention.base import LayerAttention
from xllm_models.attention.mla_base import MlaBackend
from xllm_models.config import ModelConfig
from xllm_models.layers.attention_cut import AttentionCut
from xllm_models.layers.linear import FusedColumnLinear, RowLinear, empty_parameter
from xllm_models.layers.rotary import pairs_to_halves, reordered
from xllm_models.layers.sharding import Shard
from xllm_models.placement import Placement

_LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says


class LatentAttention(nn.Module):
    handle: torch.Tensor

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, **kind: object) -> None:
        super().__init__()
        assert config.mla is not None
        self.mla = mla = config.mla
        self.ops: ModuleType = kind["ops"]  # type: ignore[assignment]
        dtype, device = kind["dtype"], kind["device"]
        group, heads, hidden = shard.group, config.num_heads, config.hidden_size
        self.num_heads, self.group = shard.num_heads, group
        self.spec = LayerAttention(layer, mla.qk_head_dim**-0.5 * config.rope.latent_score_scale)
        self.backend: MlaBackend | None = None
        self.cut: AttentionCut | None = None
        q_rows = heads * mla.qk_head_dim
        self.q_down: FusedColumnLinear | None = None
        if mla.q_lora_rank is None:
            self.query = FusedColumnLinear(hidden, [("q_proj", q_rows, group.rank, group.size)], False,
                                           **kind)  # type: ignore[arg-type]
        else:
            self.q_down = FusedColumnLinear(hidden, [("q_a_proj", mla.q_lora_rank, 0, 1)], config.attention_bias,
                                            **kind)  # type: ignore[arg-type]
            self.q_norm = empty_parameter((mla.q_lora_rank,), dtype, device)  # type: ignore[arg-type]
            self.query = FusedColumnLinear(mla.q_lora_rank, [("q_b_proj", q_rows, group.rank, group.size)], False,
                                           **kind)  # type: ignore[arg-type]
        self.kv_down = FusedColumnLinear(hidden, [("kv_a_proj_with_mqa", mla.cache_width, 0, 1)],
                                         config.attention_bias, **kind)  # type: ignore[arg-type]
        self.kv_norm = empty_parameter((mla.kv_lora_rank,), dtype, device)  # type: ignore[arg-type]
        up_shape = (self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        self.up = empty_parameter(up_shape, dtype, device)  # type: ignore[arg-type]
        self.output = RowLinear(heads * mla.v_head_dim, hidden, config.attention_output_bias, group,
                                **kind)  # type: ignore[arg-type]
        number = next(_numbers)
        self.register_buffer("handle", torch.tensor(number, device="cpu"), persistent=False)
        _layers[number] = self

    def placements(self, prefix: str) -> dict[str, Placement]:
        mla, group = self.mla, self.group
        nope, rotated, latent = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
        halves = pairs_to_halves(rotated) if mla.rope_interleave else torch.arange(rotated)
        query_order = torch.cat((nope + halves, torch.arange(nope)))  # the checkpoint has rotated rows last
        latent_order = torch.cat((torch.arange(latent), latent + halves))
        found = {name: reordered(place, query_order) for name, place in self.query.placements(prefix).items()}
        found |= {name: reordered(place, latent_order) for name, place in self.kv_down.placements(prefix).items()}
        rows = self.up.shape[0] * group.size
        found[f"{prefix}kv_b_proj.weight"] = Placement(self.up, (rows, latent), (), 0, group.rank, group.size)
        found[f"{prefix}kv_a_layernorm.weight"] = Placement(self.kv_norm, (latent,))
        if self.q_down is not None:
            found |= self.q_down.placements(prefix)
            found[f"{prefix}q_a_layernorm.weight"] = Placement(self.q_norm, tuple(self.q_norm.shape))
        return found | self.output.placements(f"{prefix}o_proj")

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        down = x
        if self.q_down is not None:
            down = self.ops.rms_norm(self.q_down(x), self.q_norm, _LATENT_EPS)
        query = self.ops.rotary(self.query(down), positions, cos_sin, self.num_heads, 0)
        latent = self.ops.norm_and_rotate(self.kv_down(x), self.kv_norm, positions, cos_sin, _LATENT_EPS)
        if torch.compiler.is_compiling():
            found = torch.ops.xllm_models.latent_attention(query, latent, self.handle, self.attended_width)
            return self.output(found)
        return self.output(self.attend(query, latent) if self.cut is None else self.cut(self, query, latent))

    @property
    def attended_width(self) -> int:
        return self.num_heads * self.mla.v_head_dim

    def attend(self, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """query [T, H * (R + P)] and latent [T, C + R], rotated -> [T, H * V]."""
        assert self.backend is not None, "bind_attention comes before the first forward"
        heads = query.view(query.shape[0], self.num_heads, self.mla.qk_head_dim)
        up = self.up.view(self.num_heads, -1, self.mla.kv_lora_rank)
        return self.backend.forward(self.spec, heads, latent, up)


_numbers = itertools.count()
_layers: WeakValueDictionary[int, LatentAttention] = WeakValueDictionary()


_library = torch.library.Library("xllm_models", "FRAGMENT")
_library.define("latent_attention(Tensor query, Tensor latent, Tensor handle, SymInt width) -> Tensor")


def _attention(query: torch.Tensor, latent: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:
    """Writes the layer's cache, which no traced code reads. A number in a tensor stands for the layer."""
    return _layers[int(handle)].attend(query, latent)


def _attention_shape(query: torch.Tensor, latent: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:
    return query.new_empty(query.shape[0], width)


_library.impl("latent_attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("xllm_models::latent_attention", _attention_shape, lib=_library)
