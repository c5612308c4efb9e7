"""The inputs of a decode step, made on the device from what the rows of the batch are: token, position, length, slot.

For steps with one new token a row: a negative token stands for the one sampled last for its row, and rows up to the
size of a captured graph are padding, which writes to slot 0 and sees one token. A vector kernel of scalar work, a row
at a time: there are as many rows as sequences, and each is a handful of numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import CompileCase, Kernel


@triton.jit(do_not_specialize=["num_rows", "num_padded", "table_stride"])
def decode_input_kernel(
    tokens, rows, start, block_table, last_token, second, token_ids, positions, seq_lens, slots,
    num_rows, num_padded, table_stride, BLOCK_SIZE: tl.constexpr, HAS_SECOND: tl.constexpr,
):
    """tokens, rows, start [num_rows] int32; block_table [num_rows, M] int32, rows table_stride apart; by table row:
    last_token int64, second int32. Writes token_ids, positions, slots [num_padded] int64 and seq_lens [num_padded]
    int32.
    """
    for row in range(tl.program_id(0), num_padded, tl.num_programs(0)):
        if row < num_rows:
            token = tl.cast(tl.load(tokens + row), tl.int64)
            place = tl.load(rows + row)
            if token < 0:
                token = tl.load(last_token + place)
            position = tl.load(start + row)
            block = tl.load(block_table + tl.cast(row, tl.int64) * table_stride + position // BLOCK_SIZE)
            tl.store(token_ids + row, token)
            if HAS_SECOND:
                tl.store(positions + row, tl.cast(2 * position + tl.load(second + place), tl.int64))
            else:
                tl.store(positions + row, tl.cast(position, tl.int64))
            tl.store(seq_lens + row, position + 1)
            tl.store(slots + row, tl.cast(block, tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE)
        else:
            nothing = tl.cast(row * 0, tl.int64)
            tl.store(token_ids + row, nothing)
            tl.store(positions + row, nothing)
            tl.store(seq_lens + row, row * 0 + 1)
            tl.store(slots + row, nothing)


def decode_input(
    tokens: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, block_table: torch.Tensor, last_token: torch.Tensor,
    block_size: int, num_padded: int, second: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions [num_padded] int64, lengths [num_padded] int32, slots [num_padded] int64.

    tokens [B] int32, below 0: sampled last for the row; rows [B] int32, of the batch table; start [B] int32, tokens in
    the cache; block_table [B, M] int32; last_token [max_rows] int64; num_padded >= B. With second [max_rows] int32,
    0 or 1 by row of the batch table, positions are 2 * start + second.
    """
    device = tokens.device
    token_ids, positions, slots = (torch.empty(num_padded, dtype=torch.int64, device=device) for _ in range(3))
    seq_lens = torch.empty(num_padded, dtype=torch.int32, device=device)
    if num_padded:
        decode_input_kernel[(vector_programs(device, num_padded),)](
            tokens, rows, start, block_table, last_token, rows if second is None else second, token_ids, positions,
            seq_lens, slots, tokens.shape[0], num_padded, block_table.stride(0), BLOCK_SIZE=block_size,
            HAS_SECOND=second is not None)
    return token_ids, positions, seq_lens, slots


def decode_input_reference(
    tokens: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, block_table: torch.Tensor, last_token: torch.Tensor,
    block_size: int, num_padded: int, second: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    at = start.long()
    token_ids = torch.where(tokens < 0, last_token[rows.long()], tokens.long())
    blocks = block_table.gather(1, (at // block_size).unsqueeze(1)).squeeze(1).long()
    positions = at if second is None else 2 * at + second[rows.long()]
    more = (0, num_padded - tokens.shape[0])
    found = (token_ids, positions, (at + 1).int(), blocks * block_size + at % block_size)
    ids, at, lengths, slots = (torch.nn.functional.pad(one, more, value=int(one is found[2])) for one in found)
    return ids, at, lengths, slots


def _case(block_size: int, has_second: bool) -> CompileCase:
    counts = dict.fromkeys(("num_rows", "num_padded", "table_stride"), "i32")
    return CompileCase(
        f"blocks of {block_size}{', two rotations' * has_second}",
        {**dict.fromkeys(("tokens", "rows", "start", "block_table"), "*i32"), "last_token": "*i64", "second": "*i32",
         "token_ids": "*i64", "positions": "*i64", "seq_lens": "*i32", "slots": "*i64", **counts},
        {"BLOCK_SIZE": block_size, "HAS_SECOND": has_second})


KERNELS = (
    Kernel(decode_input_kernel, (_case(128, False), _case(16, False), _case(128, True)), ub_budget=1 << 10),
)
