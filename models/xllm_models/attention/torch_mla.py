"""The reference backend for latent attention: plain torch, any device, every case by one code path.

Each row's latents are gathered through its block table, expanded to keys and values a few heads at a time, and
attended in float32 with an explicit mask. Slow and obviously right; other backends are compared with it.
"""

from __future__ import annotations

from functools import partial

import torch

from xllm_models.attention.base import LayerAttention, NewCache, zeros
from xllm_models.attention.mla_base import MlaBackend, MlaSpec
from xllm_models.attention.torch_attention import attend
from xllm_models.forward_input import AttentionMetadata

_EXPANDED = 1 << 24  # values of keys, values or scores that exist at once


class TorchMla(MlaBackend):
    def __init__(self, spec: MlaSpec) -> None:
        self.spec = spec
        self.caches = []
        self._metadata: AttentionMetadata | None = None

    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        spec = self.spec
        shape = (num_blocks, spec.block_size, spec.width)
        make = new_cache or partial(zeros, spec.device)
        self.caches = [make(shape, spec.dtype) for _ in range(spec.num_layers)]

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        assert self._metadata is not None, "prepare comes before forward"
        self.write(layer.layer, latent)
        out = query.new_empty(query.shape[0], self.spec.num_heads, self.spec.value_size)
        self.attend_rows(layer, query, up, out)
        return out.flatten(1)

    def write(self, layer: int, latent: torch.Tensor) -> None:
        """latent [T, C + R] to the step's slots."""
        assert self._metadata is not None
        self.caches[layer].view(-1, self.spec.width)[self._metadata.slot_mapping] = latent.to(self.spec.dtype)

    def attend_rows(
        self, layer: LayerAttention, query: torch.Tensor, up: torch.Tensor, out: torch.Tensor, first_row: int = 0
    ) -> None:
        """Fill out [T, H, V] for the rows from `first_row` on."""
        metadata, spec, cache = self._metadata, self.spec, self.caches[layer.layer]
        assert metadata is not None
        starts, lengths = metadata.query_start_host.tolist(), metadata.seq_lens_host.tolist()
        for row in range(first_row, len(lengths)):
            begin, end, length = starts[row], starts[row + 1], lengths[row]
            blocks = metadata.block_table[row, : -(-length // spec.block_size)].long()
            latents = cache[blocks].flatten(0, 1)[:length].float()  # [length, C + R]
            step = max(1, _EXPANDED // (length * max(spec.nope_size + spec.rope_size, spec.value_size, end - begin)))
            for first in range(0, spec.num_heads, step):
                heads = slice(first, first + step)
                keys, values = expand(latents, up[heads].float(), spec)
                out[begin:end, heads] = attend(query[begin:end, heads], keys, values, layer).to(out.dtype)


def expand(latents: torch.Tensor, up: torch.Tensor, spec: MlaSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """latents [length, C + R], up [h, P + V, C] -> keys [length, h, R + P] and values [length, h, V]."""
    compressed, rotated = latents.split((spec.latent_size, spec.rope_size), dim=1)
    expanded = torch.einsum("lc,hpc->lhp", compressed, up)
    nope, values = expanded.split((spec.nope_size, spec.value_size), dim=2)
    shared = rotated.unsqueeze(1).expand(-1, up.shape[0], -1)
    return torch.cat((shared, nope), dim=2), values
