"""The contract of backends for multi-head latent attention (MLA): the cache holds latents, and no keys or values.

A token and layer has one vector of C + R values: the normed latent, from which every head's key and value are linear
images, and the rotated part of the key, which all heads share. Life cycle and order of calls are attention/base.py's.

A backend may expand the latents to keys and values, or absorb the projections: with U_K [P, C] and U_V [V, C] of a
head, q . (U_K c) = (U_K' q) . c and sum p_i U_V c_i = U_V (sum p_i c_i), so that queries read latents as they lie.

Letters beside forward_input's: C latent, R rotated, P without position, V value; E = P + R.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from xllm_models.attention.base import LayerAttention, PagedBackend


@dataclass(slots=True, frozen=True)
class MlaSpec:
    """One rank's latent attention. Heads are cut over ranks; the cache is the same on all of them."""

    num_layers: int
    num_heads: int  # H, this rank's
    latent_size: int  # C
    rope_size: int  # R
    nope_size: int  # P
    value_size: int  # V
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def width(self) -> int:
        """C + R"""
        return self.latent_size + self.rope_size


class MlaBackend(PagedBackend):
    """Caches are [blocks, block_size, C + R] a layer."""

    spec: MlaSpec
    caches: list[torch.Tensor]

    @classmethod
    def kv_bytes_per_block(cls, spec: MlaSpec) -> int:
        return spec.num_layers * spec.block_size * spec.width * spec.dtype.itemsize

    @classmethod
    def num_kv_caches(cls, spec: MlaSpec) -> int:
        return spec.num_layers

    @abstractmethod
    def forward(
        self, layer: LayerAttention, query: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """Write the latents, then attend (causal); layers have no sliding window.

        query [T, H, R + P], rotated part first; latent [T, C + R], normed and rotated; up [H, P + V, C], each head's
        U_K above its U_V -> [T, H * V].
        """

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        for source, target in pairs.tolist():
            for cache in self.caches:
                cache[target] = cache[source]
