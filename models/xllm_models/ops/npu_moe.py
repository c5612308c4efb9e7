"""Mixture of experts on Ascend NPUs: CANN's gating, routing, grouped products and weighted sum.

Nothing here asks the device for a value, so a graph may hold all of it. What CANN's operators do not do (experts with
biases, other activations, softmax over groups) is left to torch_moe. Import-safe; calling needs torch_npu.
"""

from __future__ import annotations

import torch

from xllm_models.moe_config import MoeConfig
from xllm_models.ops import torch_moe

_BEST_EXPERT, _BEST_TWO = 0, 1  # group_select_mode: what a group is ranked by
_SIGMOID = 1  # norm_type
_COUNTS = 1  # expert_tokens_num_type and group_list_type: tokens of each expert, not running sums
_BY_ROWS, _ONE_MATRIX = 0, 2  # group_type, split_item: rows of one matrix in groups, one matrix out
_NOT_QUANTISED = -1
_TOKEN_MAJOR = 2  # drop_pad_mode: row indices lie as token * k + column


def route(
    logits: torch.Tensor, moe: MoeConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch_moe.route: logits [T, E] float32, bias [E] float32 -> weights [T, k] float32, experts [T, k] int32."""
    grouped = moe.top_groups < moe.num_groups
    if moe.scoring == "sigmoid" and moe.normalize:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, moe.top_k, bias=bias, k_group=moe.top_groups if grouped else 1,
            group_count=moe.num_groups if grouped else 1,
            group_select_mode=_BEST_EXPERT if moe.group_score == "max" else _BEST_TWO, norm_type=_SIGMOID,
            routed_scaling_factor=moe.scaling_factor)
        return weights, ids
    if moe.scoring == "sigmoid" or grouped or bias is not None:
        return torch_moe.route(logits, moe, bias)
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, k=moe.top_k)
    if moe.normalize or moe.scoring == "softmax_top_k":  # a softmax over the chosen alone is the same
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * moe.scaling_factor, ids


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    first_expert: int = 0,
) -> torch.Tensor:
    """torch_moe.moe_experts with silu and without biases.

    x [T, N]; ids, weights [T, k]; gate_up [e, 2I, N]; down [e, N, I] of experts first_expert..first_expert+e-1.
    """
    count, (num_tokens, top_k) = gate_up.shape[0], ids.shape
    local = ids - first_expert
    local = torch.where((local >= 0) & (local < count), local, count)  # of others, all as one expert that is not active
    rows, where, tokens, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, local, active_num=num_tokens * top_k, expert_num=count + 1, expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True, active_expert_range=[0, count], quant_mode=_NOT_QUANTISED, row_idx_type=0)
    inner = torch.ops.npu.npu_swiglu(_grouped(rows, gate_up, tokens))
    outer = _grouped(inner, down, tokens)
    place = torch.arange(outer.shape[0], device=x.device).unsqueeze(1)
    outer = torch.where(place < tokens.sum(), outer, 0)  # rows of no active expert may hold anything
    share = torch.where(where.view(num_tokens, top_k) >= 0, weights, 0).to(x.dtype)
    return torch.ops.npu.npu_moe_finalize_routing(outer, None, None, None, share, where.clamp(min=0), None,
                                                  drop_pad_mode=_TOKEN_MAJOR)


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """rows [M, K], those of each expert together, times its matrix of [e, N, K]; tokens [e] int64 -> [M, N]."""
    return torch.ops.npu.npu_grouped_matmul([rows], [matrices.transpose(1, 2)], group_list=tokens,
                                            group_list_type=_COUNTS, group_type=_BY_ROWS, split_item=_ONE_MATRIX)[0]
