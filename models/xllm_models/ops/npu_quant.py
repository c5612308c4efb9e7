"""Products of int8 matrices on Ascend NPUs, as torch_quant defines them. Import-safe; calling needs torch_npu."""

from __future__ import annotations

import torch

_FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ: the layout the cube units read a matrix in


def dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] half precision -> (int8 [T, K], scale [T] float32)."""
    quantized, scale = torch.ops.npu.npu_dynamic_quant(x)
    return quantized, scale


def pack_quantized(weight: torch.Tensor) -> torch.Tensor:
    """weight int8 [N, K] -> [K, N] in the cube units' layout."""
    return torch.ops.npu.npu_format_cast(weight.t().contiguous(), _FRACTAL_NZ)


def quant_matmul(
    x: torch.Tensor, x_scale: torch.Tensor, packed: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x int8 [T, K], x_scale [T] float32, packed int8 [K, N], weight_scale [N] float32 -> [T, N], half precision."""
    return torch.ops.npu.npu_quant_matmul(x, packed, weight_scale, pertoken_scale=x_scale, output_dtype=dtype)
