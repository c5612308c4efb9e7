"""Quantisation to int8, products of quantised and grouped matrices, storage formats.

Grouped products: rows of one matrix in consecutive groups, a matrix a group (group_type 0, one tensor in, one out).
"""

from __future__ import annotations

import torch
from npu_emulator.registry import FLOATS, HALF, npu_operator, require, require_dtype, require_shape

FORMAT_ND, FORMAT_NZ = 2, 29
_DTYPES = {1: torch.float16, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 27: torch.bfloat16}


def refuse(rest: dict) -> None:
    used = [name for name, value in rest.items() if value is not None]
    require(not used, f"{', '.join(used)}: not modelled")


@npu_operator("npu_dynamic_quant")
def dynamic_quant(input, *, smooth_scales=None, quant_mode="pertoken", dst_type_max=0.0, **rest):
    """[..., N] -> (int8 [..., N], scale [...] float32), one scale a row."""
    refuse(rest)
    require(quant_mode == "pertoken" and dst_type_max == 0, "only int8 a token is modelled")
    require_dtype("input", input, *HALF)
    x = input.float()
    if smooth_scales is not None:
        require_dtype("smooth_scales", smooth_scales, input.dtype)
        require_shape("smooth_scales", smooth_scales, input.shape[-1])
        x = x * smooth_scales.float()
    scale = x.abs().amax(-1) / 127
    quantised = torch.round(x / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return quantised.to(torch.int8), scale


@npu_operator("npu_quant_matmul")
def quant_matmul(x1, x2, scale, *, pertoken_scale=None, bias=None, output_dtype=None, **rest):
    """x1 int8 [M, K], x2 int8 [K, N], scale [N] or [1], pertoken_scale [M] float32 -> [M, N] half precision."""
    refuse(rest)
    require_dtype("x1", x1, torch.int8)
    require_dtype("x2", x2, torch.int8)
    require(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0],
            f"x1 {list(x1.shape)} and x2 {list(x2.shape)} do not fit")
    require_dtype("scale", scale, torch.float32, torch.bfloat16)
    require(scale.shape in ((x2.shape[1],), (1,)), f"scale {list(scale.shape)} is not [{x2.shape[1]}] or [1]")
    out_dtype = output_dtype if isinstance(output_dtype, torch.dtype) else _DTYPES.get(output_dtype)
    require(out_dtype in HALF, f"output_dtype {output_dtype} is not modelled: torch.float16 or torch.bfloat16")
    product = x1.to(torch.int32) @ x2.to(torch.int32)
    if bias is not None:
        require_dtype("bias", bias, torch.int32)
        require_shape("bias", bias, x2.shape[1])
        product = product + bias
    out = product.float() * scale.float()
    if pertoken_scale is not None:
        require_dtype("pertoken_scale", pertoken_scale, torch.float32)
        require_shape("pertoken_scale", pertoken_scale, x1.shape[0])
        out = out * pertoken_scale.unsqueeze(-1)
    return out.to(out_dtype)


@npu_operator("npu_grouped_matmul")
def grouped_matmul(
    x, weight, *, bias=None, scale=None, per_token_scale=None, group_list=None, split_item=0, group_type=None,
    group_list_type=0, act_type=0, output_dtype=None, **rest,
):
    """x [[M, K]], weight [[E, K, N]], group_list [E] int64 (type 0: running sums, 1: counts) -> [[M, N]]."""
    refuse(rest)
    require(scale is None and per_token_scale is None and act_type == 0, "quantised groups are not modelled")
    require(len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0,
            "only one matrix in and out, grouped by rows (split_item 2 or 3, group_type 0), is modelled")
    rows, matrices = x[0], weight[0]
    require_dtype("x", rows, *FLOATS)
    require_dtype("weight", matrices, rows.dtype)
    require(rows.dim() == 2 and matrices.dim() == 3 and rows.shape[1] == matrices.shape[1],
            f"x {list(rows.shape)} and weight {list(matrices.shape)} do not fit")
    require(group_list is not None, "grouping by rows needs group_list")
    require_dtype("group_list", group_list, torch.int64)
    require_shape("group_list", group_list, matrices.shape[0])
    require(group_list_type in (0, 1), f"group_list_type {group_list_type} is not modelled")
    ends = (group_list.cumsum(0) if group_list_type == 1 else group_list).tolist()
    require(all(a <= b for a, b in zip([0, *ends], ends)) and ends[-1] <= rows.shape[0],
            f"the groups end at {ends}, of {rows.shape[0]} rows: is group_list_type right?")
    out = torch.full((rows.shape[0], matrices.shape[2]), float("nan"), dtype=rows.dtype)  # beyond the groups: anything
    for i, (begin, end) in enumerate(zip([0, *ends], ends)):
        product = rows[begin:end].float() @ matrices[i].float()
        out[begin:end] = (product if not bias else product + bias[0][i].float()).to(rows.dtype)
    return [out]


@npu_operator("npu_format_cast")
def format_cast(input, acl_format, **rest):
    """A copy. Formats are the device's layout of a weight; what is in it stays the same."""
    refuse(rest)
    require(acl_format in (FORMAT_ND, FORMAT_NZ), f"acl_format {acl_format} is not modelled: 2 (ND) or 29 (NZ)")
    require(acl_format == FORMAT_ND or input.dim() >= 2, "NZ is a format of matrices")
    return input.clone()
