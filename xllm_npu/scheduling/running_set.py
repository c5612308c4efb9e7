"""The sequences that have rows: placing them, forking them, and letting them go.

Owns the `BatchTable` and the `BlockManager`. A row and its blocks are given back only when the last step that reads or
writes them has ended (`finish_step`), so an early stop under overlapped scheduling can never hand a block to another
sequence while a step in flight still writes it. Decides nothing: the scheduler does.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.adapter_slots import AdapterSlots
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.strategy import ttft_deadline
from xllm_npu.state.batch_table import DECODE, ENDED, PREFILL, BatchTable
from xllm_npu.state.kv_cache.block_manager import BlockManager
from xllm_npu.state.kv_cache.block_pool import BlockPool
from xllm_npu.state.request import NO_ROW, Sequence, SequenceState

I32 = npt.NDArray[np.int32]


class RunningSet:
    def __init__(self, options: SchedulerOptions, pool: BlockPool | None = None) -> None:
        size = options.block_size
        self.table = BatchTable(options.max_seqs, options.max_model_len, -(-options.max_model_len // size))
        self.blocks = BlockManager(
            self.table, pool or BlockPool(options.num_blocks), size,
            prefix_seed=options.prefix_seed, enable_prefix_cache=options.enable_prefix_cache,
        )
        self.adapters = AdapterSlots(options.max_loras)
        self.options = options
        self.by_row: list[Sequence | None] = [None] * options.max_seqs
        self.completed_step = -1
        self.maybe_shared: set[int] = set()  # rows whose last block may be shared with a fork
        self.long_stop_rows: set[int] = set()  # rows with more stop ids than the table has columns
        self.released: list[int] = []  # rows the workers must forget, for the next step
        self.num_running = 0
        self.num_offline = 0  # of those, sequences of offline requests
        self.any_in_flight = False  # a step has been scheduled and not processed; the scheduler keeps it
        self._prefilling: list[Sequence] = []  # in order
        self._leaving: deque[int] = deque()  # ended rows whose last step is in flight
        self._decode_rows: I32 = np.zeros(0, np.int32)
        self._decode_dirty = False

    # Views

    def prefilling(self) -> list[Sequence]:
        """Running sequences whose prompt is not computed yet, in order."""
        return self._prefilling.copy()

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    def decode_rows(self) -> I32:
        """Rows that decode, in order. The array is not to be written."""
        if self._decode_dirty:
            t = self.table
            rows = np.flatnonzero(t.phase == DECODE).astype(np.int32)
            self._decode_rows = rows[np.lexsort((t.arrival[rows], t.rank[rows], t.offline[rows]))]
            self._decode_dirty = False
        return self._decode_rows

    def sequences(self) -> list[Sequence]:
        """Those that run and are not on their way out, in order."""
        return self._prefilling + [s for r in self.decode_rows().tolist() if (s := self.by_row[r]) is not None]

    def in_flight(self, row: int) -> bool:
        return int(self.table.last_step[row]) > self.completed_step

    # Coming

    def place(self, sequence: Sequence) -> int:
        """Give a waiting sequence a row and fill it; returns the tokens that prefix hits cover."""
        row = self._fill_row(sequence)
        use_prefix = not sequence.request.wants_prompt_logprobs
        cached = self.blocks.take_prefix(row, sequence.chain, sequence.tokens) if use_prefix else 0
        self.table.num_computed[row] = cached
        self.table.phase[row] = PREFILL
        sequence.num_indexed = cached // self.blocks.block_size
        self._prefilling.append(sequence)
        self._prefilling.sort()
        return cached

    def place_fork(self, sibling: Sequence, source: Sequence) -> int:
        """Give `sibling` a row that shares the blocks of `source`, whose prompt has just been scheduled."""
        row = self._fill_row(sibling)
        self.blocks.fork(source.row, row)
        self.table.num_computed[row] = self.table.num_computed[source.row]
        sibling.chain, sibling.root = source.chain.copy(), source.root
        sibling.num_indexed = source.num_indexed
        self.maybe_shared.update((source.row, row))
        self.start_decode(sibling)
        return row

    def _fill_row(self, sequence: Sequence) -> int:
        t = self.table
        row = t.take_row()
        n = len(sequence.tokens)
        message = sequence.request.message
        t.token_ids[row, :n] = sequence.tokens
        t.num_tokens[row] = t.prefill_target[row] = n
        t.num_prompt[row] = sequence.num_prompt
        t.max_total[row] = sequence.max_total
        t.key[row] = sequence.key
        t.last_step[row] = -1
        if not t.set_stop_ids(row, sequence.stop_ids):
            self.long_stop_rows.add(row)
        t.offline[row], t.rank[row] = sequence.order[0], sequence.order[1]
        t.arrival[row] = sequence.request.arrival * 256 + sequence.index
        t.deadline[row] = time.monotonic() + (ttft_deadline(message) - time.time())
        t.tpot[row] = message.tpot_slo_ms / 1e3 if message.tpot_slo_ms else np.inf
        self.adapters.take(message.lora_id)
        sequence.row, sequence.state = row, SequenceState.RUNNING
        self.by_row[row] = sequence
        self.num_running += 1
        self.num_offline += sequence.order[0]
        return row

    def start_decode(self, sequence: Sequence) -> None:
        """All known tokens of the row are scheduled; from the next step on it decodes."""
        if self.table.phase[sequence.row] == PREFILL:
            self._prefilling = [s for s in self._prefilling if s is not sequence]
        self.table.phase[sequence.row] = DECODE
        self._decode_dirty = True

    # Going

    def index_prompt_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` known tokens findable by other requests."""
        full = num_tokens // self.blocks.block_size
        if full > sequence.num_indexed:
            self.blocks.index_blocks(sequence.row, sequence.chain, sequence.num_indexed, full)
            sequence.num_indexed = full

    def leave(self, sequence: Sequence) -> None:
        """The sequence stops running now; its row and blocks go back when its last step has ended."""
        row = sequence.row
        if self.table.phase[row] == PREFILL:
            self._prefilling = [s for s in self._prefilling if s is not sequence]
        self.table.phase[row] = ENDED
        self._decode_dirty = True
        self.maybe_shared.discard(row)
        self.num_running -= 1
        self.num_offline -= sequence.order[0]
        self.adapters.give(sequence.request.message.lora_id)
        if self.in_flight(row):
            self._leaving.append(row)
        else:
            self._give_back(row)

    def finish_step(self, step_id: int) -> list[Sequence]:
        """The step has ended: give back what waited for it. Returns the sequences that left their rows now."""
        self.completed_step = step_id
        gone: list[Sequence] = []
        for _ in range(len(self._leaving)):
            row = self._leaving.popleft()
            if self.in_flight(row):
                self._leaving.append(row)
                continue
            sequence = self.by_row[row]
            assert sequence is not None
            self._give_back(row)
            gone.append(sequence)
        return gone

    def _give_back(self, row: int) -> None:
        t = self.table
        sequence = self.by_row[row]
        assert sequence is not None
        known = min(int(t.num_tokens[row]), int(t.num_computed[row]))
        if self.options.enable_prefix_cache and sequence.request.prompt_logprobs is None:
            self.blocks.prefix.extend_chain(sequence.chain, sequence.root, t.token_ids[row], known)
            self.index_prompt_blocks(sequence, known)
        if sequence.state is not SequenceState.FINISHED:  # preempted: it will come back with what it knows
            sequence.tokens = t.row_tokens(row).copy()
        self.blocks.free(row)
        t.give_row(row)
        self.released.append(row)
        self.by_row[row] = None
        self.long_stop_rows.discard(row)
        sequence.row = NO_ROW
        sequence.num_indexed = 0

    def check_integrity(self) -> None:
        self.table.check_integrity()
        self.blocks.check_integrity()
        self.adapters.check_integrity()
        used = sorted({s.request.message.lora_id for s in self.sequences()} - {0})
        assert used == self.adapters.running, "the adapters' counts and the sequences disagree"
        for row, sequence in enumerate(self.by_row):
            assert (sequence is None) == (self.table.phase[row] == 0), f"row {row} and its sequence disagree"
            assert sequence is None or sequence.row == row
        assert sorted(r for r in self._leaving) == np.flatnonzero(self.table.phase == ENDED).tolist()
        assert {s.row for s in self._prefilling} == set(np.flatnonzero(self.table.phase == PREFILL).tolist())
        expected = np.flatnonzero((self.table.phase == PREFILL) | (self.table.phase == DECODE)).size
        assert self.num_running == expected, f"{self.num_running} counted, {expected} running"
