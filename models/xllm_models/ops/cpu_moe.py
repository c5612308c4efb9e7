"""Experts on the CPU: few tokens through a kernel that reads each matrix once, many through one product an expert."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from xllm_models.ops import cpu_moe_kernels, torch_moe
from xllm_models.ops.cpu_numeric import BFLOAT16, FLOAT32
from xllm_models.ops.cpu_team import run

KERNEL_ROWS = 8  # mean tokens an expert up to which the kernel is used

_ENCODINGS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_KINDS = {"silu": cpu_moe_kernels.SILU, "gelu": cpu_moe_kernels.GELU, "gelu_tanh": cpu_moe_kernels.GELU_TANH,
          "clamped_swiglu": cpu_moe_kernels.CLAMPED_SWIGLU}
_ONE_THREAD = 65536  # products below which waking the other threads costs more than they give
_kernel = cpu_moe_kernels.moe_experts.address


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, first_expert: int = 0, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    local = ids.numpy().ravel().astype(np.int64) - first_expert
    order = np.argsort(local, kind="stable")
    begin, end = np.searchsorted(local[order], (0, gate_up.shape[0]))
    order = order[begin:end]  # places in ids whose expert is here, by expert
    out = torch.zeros(x.shape, dtype=torch.float32)
    if not order.size:
        return out.to(x.dtype)
    experts, starts = np.unique(local[order], return_index=True)
    starts = np.append(starts, order.size)
    tokens, chosen = order // ids.shape[1], weights.reshape(-1)[torch.from_numpy(order)]
    biases = (gate_up_bias, down_bias)
    if order.size <= KERNEL_ROWS * experts.size and x.dtype in _ENCODINGS:
        _by_kernel(x, out, gate_up, down, biases, experts, starts, tokens, chosen, activation)
    else:
        _by_products(x, out, gate_up, down, biases, experts, starts, tokens, chosen, activation)
    return out.to(x.dtype)


_Biases = tuple[torch.Tensor | None, torch.Tensor | None]


def _by_kernel(
    x: torch.Tensor, out: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, biases: _Biases,
    experts: np.ndarray, starts: np.ndarray, tokens: np.ndarray, weights: torch.Tensor, activation: str,
) -> None:
    pairs, (rows, hidden), width = tokens.size, x.shape, down.shape[2]
    source, inner = x.float().contiguous(), torch.empty(pairs, width)
    threads = 1 if pairs * width * hidden < _ONE_THREAD else torch.get_num_threads()
    addresses = [0 if bias is None else bias.data_ptr() for bias in biases]
    run(_kernel, threads, _ENCODINGS[x.dtype], source.data_ptr(), inner.data_ptr(), out.data_ptr(), gate_up.data_ptr(),
        down.data_ptr(), *addresses, experts.ctypes.data, starts.ctypes.data, tokens.ctypes.data, weights.data_ptr(),
        rows, hidden, width, pairs, gate_up.shape[0], experts.size, _KINDS[activation])


def _by_products(
    x: torch.Tensor, out: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, biases: _Biases,
    experts: np.ndarray, starts: np.ndarray, tokens: np.ndarray, weights: torch.Tensor, activation: str,
) -> None:
    index = torch.from_numpy(tokens)
    for expert, begin, end in zip(experts.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        rows, (up_bias, down_bias) = index[begin:end], (None if b is None else b[expert] for b in biases)
        inner = torch_moe.gated(F.linear(x[rows], gate_up[expert], up_bias), activation)
        outer = F.linear(inner, down[expert], down_bias).float()
        out.index_add_(0, rows, outer.mul_(weights[begin:end].unsqueeze(1)))
