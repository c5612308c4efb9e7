"""Attention on NVIDIA GPUs by torch alone: keys gathered from the pages, scaled_dot_product_attention on them.

Import-safe without a GPU. Correct and simple: decode rows are one padded batch, prefill rows go one by one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xllm_models.attention.base import LayerAttention
from xllm_models.attention.torch_attention import TorchAttention


class CudaAttention(TorchAttention):
    features = frozenset()

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        self.write(layer.layer, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decodes := metadata.num_decodes:
            self._attend(layer, query[:decodes].unsqueeze(1), slice(0, decodes), out[:decodes].unsqueeze(1))
        starts = metadata.query_start_host.tolist()
        for row in range(decodes, len(starts) - 1):
            tokens = slice(starts[row], starts[row + 1])
            self._attend(layer, query[tokens].unsqueeze(0), slice(row, row + 1), out[tokens].unsqueeze(0))
        return out.flatten(1)

    def _attend(self, layer: LayerAttention, query: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        """query, out [b, n, H, E]: the last n positions of each of b rows."""
        metadata, block_size = self._metadata, self.spec.block_size
        assert metadata is not None
        lengths = metadata.seq_lens[rows].view(-1, 1, 1)  # [b, 1, 1]
        blocks = -(-int(metadata.seq_lens_host[rows].max()) // block_size)
        table = metadata.block_table[rows, :blocks].long()
        keys, values = (cache[layer.layer][table].flatten(1, 2).transpose(1, 2).to(query.dtype)  # [b, K, S, E]
                        for cache in (self.key_caches, self.value_caches))
        n = query.shape[1]
        at = lengths - n + torch.arange(n, device=query.device).view(1, -1, 1)  # [b, n, 1]
        of = torch.arange(blocks * block_size, device=query.device).view(1, 1, -1)
        seen = of <= at
        if layer.sliding_window:
            seen = seen & (of > at - layer.sliding_window)
        result = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=seen.unsqueeze(1),
                                                scale=layer.scale, enable_gqa=True)
        out.copy_(result.transpose(1, 2))
