"""The beams of one search: which live, which have ended, which are best. What it decides by are log probabilities.

vLLM's rules. Each step looks at the likeliest next tokens of every live beam, at least twice as many as there are
beams. A stop token ends a copy of its beam; the others go on with the `width` likeliest continuations of all. A beam's
score is its cumulative logprob / length ** length_penalty, where the length counts the prompt and not the stop token.
The search is over when the beams have `max_tokens` tokens, or earlier if none of them can come to a better score than
the beams that are to be returned: a cumulative logprob never grows. Knows no engine, no text and no requests.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xllm_npu.state.messages import Logprobs
from xllm_npu.state.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Beam:
    """One token and the beam it continues."""

    parent: Beam | None  # None for the empty beam that all begin with
    token_id: int = -1
    logprob: float = 0.0  # of all tokens
    length: int = 0  # tokens so far, a stop token included
    stop_token_id: int = -1  # token_id, if it ended the beam
    measured: Logprobs | None = None  # at the last token, as the client wants it

    def path(self) -> list[Beam]:
        """From the first token to this one."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> Iterator[Beam]:
        beam = self
        while beam.parent is not None:
            yield beam
            beam = beam.parent

    def token_ids(self) -> list[int]:
        return [beam.token_id for beam in self.path()]


class Beams:
    """`live` are to be measured, the best first; then `advance`, until `done`; then `best`."""

    def __init__(self, params: SamplingParams, num_prompt: int, stop_ids: Sequence[int]) -> None:
        """`params`: as completed for the prompt, max_tokens included."""
        assert params.max_tokens is not None
        self._params = params
        self._max_tokens = params.max_tokens
        self._width = params.num_sequences
        self._num_prompt = num_prompt
        self._num_asked = len(params.logprob_token_ids)  # the last of each position's
        self._stop_ids = np.array(stop_ids, np.int64)
        self._ended: list[Beam] = []  # the n best of them, best first
        self._keys: list[float] = []  # their scores, negative: ascending
        self.live = [Beam(None)]

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens `advance` wants to see of each live beam (or all that there are).

        Twice the width, as vLLM; more if stop tokens could leave fewer than `width` continuations, or to show them.
        """
        return max(2 * self._width, self._width + len(self._stop_ids), self._params.logprobs or 0)

    def advance(self, measured: Sequence[Logprobs]) -> None:
        """One step: `measured[i]` is what comes after `live[i]`, the chosen token first, then the likeliest."""
        count = min(self.num_logprobs, *(len(m.token_ids) - 1 - self._num_asked for m in measured))
        ids = np.array([m.token_ids[1 : 1 + count] for m in measured], np.int64)  # [beams, count]
        total = np.array([m.logprobs[1 : 1 + count] for m in measured])  # [beams, count] float64
        total += np.array([[beam.logprob] for beam in self.live])
        stops = np.isin(ids, self._stop_ids)  # [beams, count]
        if self.live[0].length >= self._params.min_tokens:
            for i, j in np.argwhere(stops & np.isfinite(total)).tolist():
                self._end(self._continued(i, j, total, measured, count, stops=True))
        total[stops] = -np.inf
        order = np.argsort(-total, axis=None, kind="stable")[: self._width]
        kept = order[np.isfinite(total.ravel()[order])]
        rows, columns = np.unravel_index(kept, total.shape)
        self.live = [self._continued(i, j, total, measured, count) for i, j in zip(rows.tolist(), columns.tolist())]

    @property
    def done(self) -> bool:
        return not self.live or self.live[0].length >= self._max_tokens or not self._can_improve()

    def best(self) -> list[Beam]:
        """The n with the highest scores, best first; beams that ended come before live ones with the same score."""
        beams = self._ended + self.live
        return sorted(beams, key=self.score, reverse=True)[: self._params.n]

    def score(self, beam: Beam) -> float:
        length = self._num_prompt + beam.length - (beam.stop_token_id >= 0)
        return self._score(beam.logprob, length)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _can_improve(self) -> bool:
        if len(self._ended) < self._params.n:
            return True
        logprob = self.live[0].logprob
        shortest, longest = self._num_prompt + self.live[0].length, self._num_prompt + self._max_tokens
        highest = max(self._score(logprob, shortest), self._score(logprob, longest))
        return highest > -self._keys[-1]

    def _end(self, beam: Beam) -> None:
        key = -self.score(beam)
        at = bisect.bisect_right(self._keys, key)
        self._keys.insert(at, key)
        self._ended.insert(at, beam)
        del self._keys[self._params.n :], self._ended[self._params.n :]

    def _continued(self, i: int, j: int, total: np.ndarray, measured: Sequence[Logprobs], count: int,
                   stops: bool = False) -> Beam:
        parent, row = self.live[i], measured[i]
        token_id = row.token_ids[1 + j]
        shown = None
        if self._params.logprobs is not None:
            top = min(self._params.logprobs, count)
            width = len(row.token_ids)
            columns = [1 + j, *range(1, 1 + top), *range(width - self._num_asked, width)]
            shown = Logprobs([row.token_ids[c] for c in columns], [row.logprobs[c] for c in columns],
                             [row.ranks[c] for c in columns])
        return Beam(parent, token_id, float(total[i, j]), parent.length + 1, token_id if stops else -1, shown)
