"""Repetition, frequency and presence penalties on logits, in place, in this order, from counts that lie on the device.

repetition (arXiv:1909.05858, section 4.1): logits of tokens in prompt or output are divided by the penalty if positive,
else multiplied by it. frequency: less the penalty times the token's count in the output. presence: less the penalty for
tokens in the output at all. A vector kernel: an item of work is a tile of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import CompileCase, Kernel

TILE_VALUES = 2048  # tokens at once


@triton.jit(do_not_specialize=["num_rows", "logits_stride", "vocab"])
def penalties_kernel(
    logits, rows, slots, output, in_prompt, repetition, frequency, presence, num_rows, logits_stride, vocab,
    TILE: tl.constexpr,
):
    """logits [S, vocab] float32, rows logits_stride apart; rows, slots [num_rows] int32; output [slots, vocab] int32,
    in_prompt [slots, vocab] int8; repetition, frequency, presence [num_rows] float32.
    """
    column = tl.arange(0, TILE)
    tiles = (vocab + TILE - 1) // TILE
    for item in range(tl.program_id(0), num_rows * tiles, tl.num_programs(0)):
        row = item // tiles
        token = item % tiles * TILE + column
        inside = token < vocab
        counts = tl.cast(tl.load(slots + row), tl.int64) * vocab
        target = logits + tl.cast(tl.load(rows + row), tl.int64) * logits_stride
        value = tl.load(target + token, mask=inside, other=0.0)
        count = tl.load(output + counts + token, mask=inside, other=0).to(tl.float32)
        prompt = tl.load(in_prompt + counts + token, mask=inside, other=0).to(tl.float32)
        penalty = tl.load(repetition + row)
        repeated = tl.where(value > 0.0, value / penalty, value * penalty)
        value = tl.where(count + prompt > 0.0, repeated, value)
        value -= tl.load(frequency + row) * count
        value -= tl.where(count > 0.0, tl.load(presence + row), 0.0)
        tl.store(target + token, value, mask=inside)


def penalties(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, output: torch.Tensor, in_prompt: torch.Tensor,
    repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor,
) -> None:
    """logits [S, V] float32, changed in place; rows [n] int32 of logits, each once, and slots [n] int32 of output
    [slots, V] int32 and in_prompt [slots, V] bool; penalties [n] float32, neutral: 1, 0, 0.
    """
    num_rows, vocab = rows.shape[0], logits.shape[1]
    assert output.shape[1] == in_prompt.shape[1] == vocab
    if num_rows and vocab:
        penalties_kernel[(vector_programs(logits.device, num_rows * triton.cdiv(vocab, TILE_VALUES)),)](
            logits, rows, slots, output, in_prompt.view(torch.int8), repetition, frequency, presence, num_rows,
            logits.stride(0), vocab, TILE=TILE_VALUES)


def penalties_reference(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, output: torch.Tensor, in_prompt: torch.Tensor,
    repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor,
) -> torch.Tensor:
    x, counts = logits[rows.long()], output[slots.long()]
    seen = (counts > 0) | in_prompt[slots.long()]
    repetition, frequency, presence = (one.unsqueeze(1) for one in (repetition, frequency, presence))
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * counts - presence * (counts > 0)
    return logits.index_copy(0, rows.long(), x)


KERNELS = (
    Kernel(
        penalties_kernel,
        (CompileCase(
            "fp32",
            {"logits": "*fp32", "rows": "*i32", "slots": "*i32", "output": "*i32", "in_prompt": "*i8",
             **dict.fromkeys(("repetition", "frequency", "presence"), "*fp32"),
             **dict.fromkeys(("num_rows", "logits_stride", "vocab"), "i32")},
            {"TILE": TILE_VALUES}),),
        ub_budget=128 << 10),
)
