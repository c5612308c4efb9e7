"""The logical operators in plain torch: the reference every faster set is compared with.

An operator set is a module with these functions. Inputs are [T, ...] contiguous along the last dimension; norms and
rotations compute in float32 and round once at the end. Operators that may overwrite their inputs say so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xllm_models.ops.torch_moe import gated, moe_experts, route

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route", "token_bitmask"]

ACTIVATIONS = {
    "silu": "silu", "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # hidden_act -> what `act_and_mul` takes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N], weight [N] -> [T, N] in x's dtype. A float32 weight is applied before rounding, others after."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype) if weight.dtype == torch.float32 else y.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual); both [T, N]. May overwrite both inputs."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate the query and key heads of packed rows; with norms, RMS-normalise each head before. May overwrite qkv.

    qkv [T, (H + 2K) * E]; positions [T] int64; cos_sin [P, R] float32, cosines then sines of R/2 angles; R <= E
    leading dimensions rotate, as pairs (i, i + R/2). Norm weights [E].
    """
    num_tokens, rotary_dim = qkv.shape[0], cos_sin.shape[1]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, -1)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    query, key = (_rotate(part, cos, sin, rotary_dim) for part in (query, key))
    return torch.cat((query, key, value), dim=1).view(num_tokens, -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    if rotary_dim < x.shape[-1]:
        parts.append(x[..., rotary_dim:])
    return torch.cat(parts, dim=-1)


def rotary_pairs(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, E], of each head the pairs (2i, 2i + 1) rotated; positions [T]; cos_sin [P, E] -> like x."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """logits [B, V]; top_k [B] int32 of 1..V; top_p [B] of 0..1 -> logits, those that are filtered out -inf.

    Of the top_k best, those are kept that the better ones leave short of top_p of their mass.
    """
    values, order = logits.sort(dim=-1, descending=True)
    values = values.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= top_k.unsqueeze(1), -torch.inf)
    mass = values.float().softmax(-1)
    values = values.masked_fill(mass.cumsum(-1) - mass >= top_p.unsqueeze(1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, values)


def norm_and_rotate(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [T, C + R]: RMS norm with weight [C] over the first C values, rotation of the last R. May overwrite x.

    cos_sin [P, R] as in `rotary`.
    """
    latent, rotated = x.split((weight.shape[0], cos_sin.shape[1]), dim=1)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)  # [T, R/2]
    return torch.cat((rms_norm(latent, weight, eps), _rotate(rotated, cos, sin, cos_sin.shape[1])), dim=-1)


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2N], gate then up -> activation(gate) * up, [T, N]. activation: silu, gelu, gelu_tanh."""
    return gated(x, activation)


def pack_linear(weight: torch.Tensor) -> torch.Tensor | None:
    """weight [N, K] in the form `linear_packed` is fastest with, or None: use `linear` on the plain weight."""
    return None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N]."""
    return F.linear(x, weight, bias)


def linear_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with what `pack_linear` returned."""
    raise AssertionError("this operator set packs nothing")


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Logits of the tokens that a grammar forbids become -inf, in place.

    logits [S, V] float; bitmask [G, at least V / 32] int32, where token t is allowed if bit t % 32 of word t // 32 is
    set; rows [G] int32, each once: row i of the mask is for row rows[i] of logits. Other rows stay as they are.
    """
    octets = bitmask.contiguous().view(torch.uint8)  # [G, 4 * words], the lowest first
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    allowed = (octets.unsqueeze(2) & bits).flatten(1)[:, : logits.shape[1]] != 0  # [G, V]
    index = rows.long()
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))
