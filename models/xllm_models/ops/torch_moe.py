"""Mixture-of-experts operators in plain torch: who goes where, and what the experts make of it. The reference.

Letters: T tokens, E experts, k experts a token, N hidden size, I intermediate size of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xllm_models.moe_config import MoeConfig

_EXPERTS_AT_ONCE = 16
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of clamped_swiglu


def route(
    logits: torch.Tensor, moe: MoeConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32, correction bias [E] float32 -> weights [T, k] float32, experts [T, k] int32.

    Numbers equal transformers' for each family, in float32. An expert's place among the k is unspecified.
    """
    if moe.scoring == "softmax_top_k":
        values, ids = logits.topk(moe.top_k, dim=-1)
        return values.softmax(dim=-1) * moe.scaling_factor, ids.to(torch.int32)
    scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if moe.top_groups < moe.num_groups:
        choice = _best_groups_only(choice, moe)
    ids = choice.topk(moe.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if moe.normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + 1e-20 if moe.scoring == "sigmoid" else total)  # sigmoids may all be zero
    return weights * moe.scaling_factor, ids.to(torch.int32)


def _best_groups_only(choice: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """Minus infinity for experts outside the token's best groups."""
    groups = choice.unflatten(1, (moe.num_groups, -1))  # there may be no tokens at all
    group_scores = groups.amax(dim=-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(moe.top_groups, dim=-1).indices
    out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    first_expert: int = 0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token through those of its experts that are here, weighted and summed in float32, [T, N].

    x [T, N]; ids [T, k] int32 and weights [T, k] float32 of all experts; gate_up [e, 2I, N], gates then ups, and
    down [e, N, I] of experts first_expert..first_expert+e-1: other ids give nothing. Biases [e, 2I] and [e, N].
    activation: silu, gelu, gelu_tanh, clamped_swiglu.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    local = ids - first_expert
    for expert in range(gate_up.shape[0]):
        tokens, place = (local == expert).nonzero(as_tuple=True)
        if tokens.numel():
            inner = F.linear(x[tokens], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            outer = F.linear(gated(inner, activation), down[expert], None if down_bias is None else down_bias[expert])
            out.index_add_(0, tokens, outer.float() * weights[tokens, place].unsqueeze(1))
    return out.to(x.dtype)


def moe_experts_of_all(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    first_expert: int = 0,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same without a value the host has to know, so that a graph can be captured: all tokens through all experts.

    For few tokens, where reading the matrices is the work, and all of them are read anyway.
    """
    count = gate_up.shape[0]
    local = ids.long() - first_expert
    here = (local >= 0) & (local < count)
    share = x.new_zeros(x.shape[0], count, dtype=torch.float32)  # [T, e]
    share.scatter_add_(1, local.clamp(0, count - 1), weights * here)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for begin in range(0, count, _EXPERTS_AT_ONCE):
        some = slice(begin, begin + _EXPERTS_AT_ONCE)
        inner = x @ gate_up[some].transpose(1, 2)  # [e, T, 2I]
        inner = inner if gate_up_bias is None else inner + gate_up_bias[some].unsqueeze(1)
        outer = gated(inner, activation) @ down[some].transpose(1, 2)  # [e, T, N]
        outer = outer if down_bias is None else outer + down_bias[some].unsqueeze(1)
        weight = share[:, some].t().unsqueeze(2)  # [e, T, 1]
        # What an expert makes of tokens that are not its own may be anything, infinity included.
        out += (outer * weight).masked_fill(weight == 0, 0).sum(dim=0)
    return out.to(x.dtype)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [..., 2I], gates then ups -> [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * SWIGLU_ALPHA)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
