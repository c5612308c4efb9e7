"""Grammars of the rows being sampled: which tokens each may have next, and the step from one token to the next.

A matcher a row, by batch-table row. In each step

    begin(rows)         the masks are computed, on threads, while the device runs the network
    mask()              the masks, on the device; for the sampler
    accept(tokens)      the matchers take what was sampled

This holds with overlapped scheduling, because overlap is the scheduler's: the worker itself runs one step after the
other, and a step ends with its tokens on the host (`Worker._result`), before the next one begins. A step that was
scheduled before its predecessor was known may have a row that has ended there; its matcher has stopped, its mask is
the stop tokens, and nobody reads its result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xllm_npu.execution.grammar_cache import GrammarCache
from xllm_npu.execution.sampling_state import to_device
from xllm_npu.state.output import GRAMMAR_TOO_COMPLEX

Int32Array = npt.NDArray[np.int32]
MASK_THREADS = 16

TokenBitmask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # the operator of xllm_models.ops


@dataclass(slots=True)
class GrammarMask:
    """Masks of the rows with a grammar, G of the S that are sampled."""

    positions: npt.NDArray[np.int64]  # [G] in the sample, ascending
    bitmask: torch.Tensor  # [G, at least V / 32] int32 on the device; bit t % 32 of word t // 32: token t is allowed
    token_bitmask: TokenBitmask

    def apply(self, logits: torch.Tensor) -> None:
        """`logits` [S, V], changed in place."""
        self.token_bitmask(logits, self.bitmask, to_device(self.positions.astype(np.int32), logits.device))


class ConstrainedDecoding:
    def __init__(
        self, grammars: GrammarCache, max_rows: int, device: torch.device, token_bitmask: TokenBitmask,
        pinned: bool = False,
    ) -> None:
        self.grammars = grammars
        self._max_rows, self._device, self._token_bitmask, self._pinned = max_rows, device, token_bitmask, pinned
        self._matchers: dict[int, Any] = {}  # llguidance.LLMatcher by row
        self._host: torch.Tensor | None = None  # [max_rows, words] int32
        self._executor: Any = None  # llguidance.LLExecutor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._positions = np.zeros(0, np.int64)  # of this step
        self._current: list[Any] = []
        self._masks: Future[None] | None = None

    def admit(self, row: int, grammar: str, output: Int32Array) -> None:
        """`output`: tokens generated before a preemption."""
        matcher = self.grammars.matcher(grammar)
        if output.size:
            matcher.consume_tokens(output.tolist())
        self._matchers[row] = matcher

    def release(self, row: int) -> None:
        """Harmless for a row without a grammar."""
        self._matchers.pop(row, None)

    def begin(self, rows: Int32Array) -> None:
        """`rows` [S] are about to be sampled; returns at once."""
        assert self._masks is None, "a step is going on"
        if not self._matchers:
            return
        positions = [i for i, row in enumerate(rows.tolist()) if row in self._matchers]
        if positions:
            self._positions = np.array(positions, np.int64)
            self._current = [self._matchers[int(rows[i])] for i in positions]
            self._masks = self._thread.submit(self._compute)

    def mask(self) -> GrammarMask | None:
        """Waits for what `begin` began; None if no row has a grammar."""
        if self._masks is None:
            return None
        self._masks.result()
        assert self._host is not None
        found = self._host[: len(self._current)]
        # One buffer will do: the copy is over when this step's tokens are on the host, and no mask is made before.
        bitmask = found if self._device.type == "cpu" else found.to(self._device, non_blocking=True)
        return GrammarMask(self._positions, bitmask, self._token_bitmask)

    def accept(self, tokens: Int32Array) -> dict[int, str]:
        """`tokens` [S] of the step, in the order of its rows -> what to tell rows that cannot go on, by position."""
        if self._masks is None:
            return {}
        self._masks = None
        failures = {}
        for position, matcher in zip(self._positions.tolist(), self._current):
            if not matcher.is_stopped():  # else it is complete, and a stop token was all it allowed
                matcher.consume_token(int(tokens[position]))
            if matcher.is_error():
                failures[position] = GRAMMAR_TOO_COMPLEX
        self._current = []
        return failures

    def close(self) -> None:
        self._thread.shutdown()
        self.grammars.close()

    def _compute(self) -> None:
        import llguidance

        if self._host is None or self._executor is None:
            words = (self.grammars.vocab_size + 31) // 32
            self._host = torch.zeros((self._max_rows, words), dtype=torch.int32, pin_memory=self._pinned)
            self._executor = llguidance.LLExecutor(max(1, min(MASK_THREADS, (os.cpu_count() or 1) // 2)))
        words = self._host.shape[1]
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(self._current)], self._host.data_ptr(), 4 * words,
            self._max_rows)
