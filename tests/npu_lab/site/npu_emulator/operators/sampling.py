"""Top-k and top-p filters of logits."""

from __future__ import annotations

import torch
from npu_emulator.registry import FLOATS, npu_operator, require, require_dtype, require_shape

MAX_K = 1024


@npu_operator("npu_top_k_top_p")
def top_k_top_p(logits, p=None, k=None):
    """logits [B, V], p [B] in their dtype, k [B] int32 of 1..1024 -> logits, filtered ones -inf. p comes before k."""
    require_dtype("logits", logits, *FLOATS)
    require(logits.dim() == 2, f"logits {list(logits.shape)} is not [B, V]")
    rows = logits.shape[0]
    values, order = torch.sort(logits, dim=-1, stable=True)
    if k is not None:
        require_dtype("k", k, torch.int32)
        require_shape("k", k, rows)
        require(((k >= 1) & (k <= MAX_K)).all(), f"k is outside of 1..{MAX_K}")
        last = (logits.shape[1] - k.long()).clamp(min=0).unsqueeze(-1)
        values = values.masked_fill(values < values.gather(1, last), float("-inf"))
    if p is not None:
        require_dtype("p", p, logits.dtype)
        require_shape("p", p, rows)
        require(((p >= 0) & (p <= 1)).all(), "p is outside of 0..1")
        dropped = values.float().softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(-1)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, values)
