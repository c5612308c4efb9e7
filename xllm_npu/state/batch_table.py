"""Per-sequence numbers of everything that is running, as preallocated numpy rows.

A running sequence owns one row from admission to the moment its last in-flight step has ended. The scheduler writes
rows, the engine reads them to build a step; both work on whole columns, so that a decode step costs a handful of
vectorised operations however many sequences run. Knows no policy and no device.

Columns that move:  num_tokens    token ids known (prompt and results processed so far)
                    num_computed  positions whose KV is written, or will be by a step already scheduled
The token at a position >= num_tokens is not known yet: an earlier step in flight will produce it (a placeholder).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

STOP_COLUMNS = 8  # stop token ids compared vectorised; a sequence with more is checked on its own

# Values of the `phase` column.
FREE, PREFILL, DECODE, ENDED = 0, 1, 2, 3


class BatchTable:
    """R rows of at most `max_tokens` tokens and `max_blocks` blocks."""

    def __init__(self, num_rows: int, max_tokens: int, max_blocks: int) -> None:
        self.num_rows = num_rows
        r = num_rows
        self.token_ids: I32 = np.zeros((r, max_tokens), np.int32)  # pages of untouched rows are never committed
        self.block_table: I32 = np.zeros((r, max_blocks), np.int32)
        self.phase = np.zeros(r, np.int8)
        self.num_tokens: I32 = np.zeros(r, np.int32)
        self.num_computed: I32 = np.zeros(r, np.int32)
        self.num_prompt: I32 = np.zeros(r, np.int32)
        self.num_blocks: I32 = np.zeros(r, np.int32)
        self.prefill_target: I32 = np.zeros(r, np.int32)  # tokens to compute before the first sample
        self.max_total: I32 = np.zeros(r, np.int32)  # prompt + max_tokens: the sequence ends here
        self.key: I64 = np.zeros(r, np.int64)
        self.last_step: I64 = np.full(r, -1, np.int64)  # the last step that reads or writes the row's blocks
        self.stop_ids: I32 = np.full((r, STOP_COLUMNS), -1, np.int32)
        # What policies order by; filled at admission.
        self.offline = np.zeros(r, np.int8)
        self.rank = np.zeros(r, np.float64)  # the strategy's key, smaller first
        self.arrival: I64 = np.zeros(r, np.int64)  # admission-independent tie-break
        self.deadline = np.full(r, np.inf, np.float64)  # time of the next due token, for latency-aware policies
        self.tpot = np.full(r, np.inf, np.float64)  # seconds a token may take
        self._free_rows = list(range(r - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        """The row's blocks must have been released."""
        assert self.num_blocks[row] == 0
        self.phase[row] = FREE
        self.last_step[row] = -1
        self._free_rows.append(row)

    def set_stop_ids(self, row: int, ids: list[int]) -> bool:
        """True if all fit into the vectorised columns."""
        self.stop_ids[row] = -1
        self.stop_ids[row, : min(len(ids), STOP_COLUMNS)] = ids[:STOP_COLUMNS]
        return len(ids) <= STOP_COLUMNS

    def row_tokens(self, row: int) -> I32:
        """A view of the known token ids."""
        return self.token_ids[row, : self.num_tokens[row]]

    def check_integrity(self) -> None:
        free = set(self._free_rows)
        assert len(free) == len(self._free_rows), "a row is twice on the free list"
        for row in range(self.num_rows):
            assert (row in free) == (self.phase[row] == FREE), f"row {row}: phase {self.phase[row]}, free {row in free}"
            if row in free:
                assert self.num_blocks[row] == 0, f"free row {row} holds blocks"
