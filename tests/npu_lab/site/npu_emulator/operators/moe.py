"""Routing of tokens to experts: gating, expansion of rows in the order of experts, and the weighted sum back."""

from __future__ import annotations

import torch
from npu_emulator.operators.matmul import refuse
from npu_emulator.registry import FLOATS, npu_operator, require, require_dtype, require_shape

SOFTMAX, SIGMOID = 0, 1  # norm_type
CUMSUM, COUNT = 0, 1  # expert_tokens_num_type
NOT_QUANTISED = -1
MAX_EXPERTS = 10240


@npu_operator("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x, finished=None, k=1):
    """x [T, E] -> (weights [T, k], experts [T, k] int32, rows [T, k] int32: column * T + row). Not renormalised."""
    require_dtype("x", x, *FLOATS)
    require(finished is None, "finished is not modelled")
    require(x.dim() == 2 and 0 < k <= x.shape[1], f"k {k} of x {list(x.shape)}")
    weights, experts = torch.sort(x.float().softmax(-1), dim=-1, descending=True, stable=True)
    tokens = x.shape[0]
    rows = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    return weights[:, :k].to(x.dtype), experts[:, :k].to(torch.int32), rows


@npu_operator("npu_moe_gating_top_k")
def gating_top_k(
    x, k, *, bias=None, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=SOFTMAX, out_flag=False,
    routed_scaling_factor=1.0, eps=1e-20, **rest,
):
    """x [T, E] -> (weights [T, k], experts [T, k] int32, scores [T, E] float32 if out_flag).

    The bias takes part in the choice alone. Groups are ranked by their best expert (mode 0) or the sum of their best
    two (1). Weights of sigmoid scores are divided by their sum, those of softmax are not.
    """
    refuse(rest)
    require_dtype("x", x, *FLOATS)
    require(x.dim() == 2 and x.shape[1] % group_count == 0, f"x {list(x.shape)} in {group_count} groups")
    require(norm_type in (SOFTMAX, SIGMOID) and renorm == 0, f"norm_type {norm_type} with renorm {renorm}")
    require(0 < k_group <= group_count, f"k_group {k_group} of {group_count}")
    require(0 < k <= k_group * x.shape[1] // group_count, f"k {k} is more than the chosen groups have")
    scores = x.float().softmax(-1) if norm_type == SOFTMAX else x.float().sigmoid()
    choice = scores
    if bias is not None:
        require_dtype("bias", bias, x.dtype)
        require_shape("bias", bias, x.shape[1])
        choice = scores + bias.float()
    if group_count > 1:
        groups = choice.view(x.shape[0], group_count, -1)
        best = groups.topk(min(2, groups.shape[-1]) if group_select_mode == 1 else 1, dim=-1).values
        rank = best.sum(-1)
        chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(1, rank.topk(k_group, dim=-1).indices, True)
        choice = groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    experts = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.empty(0)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), out


@npu_operator("npu_moe_init_routing_v2")
def init_routing_v2(
    x, expert_idx, *, scale=None, active_num=-1, expert_num=-1, drop_pad_mode=0, expert_tokens_num_type=CUMSUM,
    expert_tokens_num_flag=False, quant_mode=NOT_QUANTISED, active_expert_range=(), row_idx_type=0, **rest,
):
    """x [T, H], expert_idx [T, k] int32 -> (rows in the order of experts [T * k, H], where each went [T * k] int32,
    tokens of each active expert [E] int64, scales [T * k] float32).

    row_idx_type 0: entry t * k + j is the row to which token t went for its expert j, -1 for an expert out of range;
    1: the inverse. Rows beyond the active ones are undefined, here NaN.
    """
    require(rest.get("offset") is None and rest.get("expert_capacity", -1) <= 0 and drop_pad_mode == 0,
            "dropping tokens is not modelled")
    require(quant_mode == NOT_QUANTISED and scale is None, "quantised routing is not modelled")
    require_dtype("x", x, *FLOATS)
    require_dtype("expert_idx", expert_idx, torch.int32)
    require(expert_idx.dim() == 2 and expert_idx.shape[0] == x.shape[0], f"expert_idx {list(expert_idx.shape)}")
    low, high = active_expert_range or (0, expert_num)
    require(0 <= low < high <= expert_num <= MAX_EXPERTS, f"experts {low} to {high} of {expert_num}")
    require(((expert_idx >= 0) & (expert_idx < expert_num)).all(), f"an expert is outside of 0..{expert_num - 1}")
    require(active_num in (-1, 0, expert_idx.numel()), f"active_num {active_num} is not T * k, {expert_idx.numel()}")
    require(expert_tokens_num_flag and expert_tokens_num_type in (CUMSUM, COUNT), "the experts' tokens are needed")
    flat = expert_idx.flatten().long()
    active = (flat >= low) & (flat < high)
    order = torch.sort(torch.where(active, flat, MAX_EXPERTS), stable=True).indices[: int(active.sum())]
    rows = torch.full((flat.numel(), x.shape[1]), float("nan"), dtype=x.dtype)
    rows[: order.numel()] = x[order // expert_idx.shape[1]]
    where = torch.full((flat.numel(),), -1, dtype=torch.int32)
    if row_idx_type == 0:
        where[order] = torch.arange(order.numel(), dtype=torch.int32)
    else:
        where[: order.numel()] = order.to(torch.int32)
    tokens = torch.bincount(flat[active] - low, minlength=high - low)
    return rows, where, tokens.cumsum(0) if expert_tokens_num_type == CUMSUM else tokens, torch.empty(0)


@npu_operator("npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row, export_for_source_row,
    drop_pad_mode=0,
):
    """rows [T * k, H], scales [T, k], the row of each token and expert [T * k] int32 -> [T, H], plus skip1 and skip2.

    drop_pad_mode 0: entries lie as column * T + token; 2: as token * k + column, which is what init_routing_v2 gives.
    """
    require(drop_pad_mode in (0, 2), f"drop_pad_mode {drop_pad_mode} is not modelled")
    require(bias is None, "bias is not modelled")
    require_dtype("expanded_src_to_dst_row", expanded_src_to_dst_row, torch.int32)
    require(scales is not None and scales.dim() == 2, "scales is not [T, k]")
    rows, (tokens, k) = expanded_permuted_rows, scales.shape
    require_dtype("expanded_permuted_rows", rows, *FLOATS)
    require_dtype("scales", scales, rows.dtype)
    require_shape("expanded_src_to_dst_row", expanded_src_to_dst_row, tokens * k)
    require(((expanded_src_to_dst_row >= 0) & (expanded_src_to_dst_row < rows.shape[0])).all(),
            "a row index is negative (an expert out of range) or beyond the rows")
    places = expanded_src_to_dst_row.long()
    places = places.view(tokens, k) if drop_pad_mode == 2 else places.view(k, tokens).t()
    out = (rows[places].float() * scales.float().unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            require_shape("skip", skip, *out.shape)
            out = out + skip.float()
    return out.to(rows.dtype)
