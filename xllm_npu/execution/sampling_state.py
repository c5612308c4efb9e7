"""What the sampler remembers of each sequence, addressed by its batch-table row.

Scalars lie in numpy vectors of `max_rows`; `needs[row]` says in bits which processors a row asks for, so
that a batch finds out what it has to do with one reduction. Rare features (bias, allowed ids, bad words,
token counts) lie in side tables that exist only for the rows that use them. Token counts and the bad words'
history are kept here, on the device, and follow the sampled tokens (`observe`), because with overlapped
scheduling the scheduler does not know them yet. Knows no sequence, request or step: `admit` and `release`
are the worker's to call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xllm_npu.state.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Bits of `SamplingState.needs`. A row with none of them is greedy and costs an argmax.
RANDOM, TOP_K, TOP_P, MIN_P = 1, 2, 4, 8
PENALTIES, MIN_TOKENS, BIAS, ALLOWED, BAD_WORDS, LOGPROBS = 16, 32, 64, 128, 256, 512
PROCESSORS = PENALTIES | MIN_TOKENS | BIAS | ALLOWED | BAD_WORDS  # what changes logits before temperature
OBSERVED = PENALTIES | BAD_WORDS  # what depends on the tokens sampled so far

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ANY_TOKEN, _NO_TOKEN = -1, -2  # in bad words' prefixes and histories


def mix64(x: UInt64Array) -> UInt64Array:
    """The splitmix64 finalizer: a bijection of 64-bit integers whose outputs look independent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: UInt64Array, num_output: Int32Array) -> npt.NDArray[np.float32]:
    """Two numbers in [0, 1) for each (seed, output index); the same for the same pair, whoever else is there.

    [S] uint64, [S] int32 -> [S, 2] float32, 24 random bits each. Counter-based: the seed is hashed
    together with the index, no state is carried.
    """
    with np.errstate(over="ignore"):
        bits = mix64(mix64(seeds + _GOLDEN * (num_output.astype(np.uint64) + np.uint64(1))))
    pair = np.stack([bits >> np.uint64(40), bits & np.uint64(0xFFFFFF)], axis=1)
    return pair.astype(np.float32) * np.float32(2.0**-24)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device without making the host wait for the work already queued there.

    On the CPU the tensor shares the array's memory: pass a copy of what will change.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class BadWords:
    """Token sequences that must not be completed. W words, L tokens in the longest but its last."""

    prefix: torch.Tensor  # [W, L] int64, right-aligned; -1 matches any token
    last: torch.Tensor  # [W] int64: the token forbidden once the prefix has been generated
    history: torch.Tensor  # [L] int64: the latest output tokens, newest last; -2 where there were none

    @classmethod
    def build(cls, words: Iterable[tuple[int, ...]], output: Int32Array, device: torch.device) -> BadWords:
        words = list(words)
        length = max(len(w) for w in words) - 1
        prefix = np.full((len(words), length), _ANY_TOKEN, np.int64)
        for row, word in zip(prefix, words):
            row[length - len(word) + 1 :] = word[:-1]
        history = np.full(length, _NO_TOKEN, np.int64)
        recent = output[len(output) - min(length, len(output)) :]
        history[length - len(recent) :] = recent
        last = np.array([w[-1] for w in words], np.int64)
        return cls(to_device(prefix, device), to_device(last, device), to_device(history, device))

    def forbidden_now(self) -> torch.Tensor:
        """[W] bool: words of which only the last token is missing."""
        return ((self.prefix == self.history) | (self.prefix == _ANY_TOKEN)).all(dim=-1)

    def observe(self, token: torch.Tensor) -> None:
        """`token`: [1] int64."""
        if self.history.numel():
            self.history = torch.cat([self.history[1:], token])


class TokenCounts:
    """How often each token occurred, for the rows with penalties: a pool of [vocab] vectors that grows by
    doubling.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot = np.full(max_rows, -1, np.int64)  # of each row; -1: none
        self._free: list[int] = []
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # [slots, V]
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # [slots, V]

    def slots(self, rows: Int32Array) -> torch.Tensor:
        """[len(rows)] int64 on the device; every row must have been admitted."""
        return to_device(self._slot[rows], self._device)

    def admit(self, row: int, prompt: Int32Array, output: Int32Array) -> None:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot[row] = slot
        counts = np.bincount(output[output < self._vocab_size], minlength=self._vocab_size).astype(np.int32)
        self.output[slot] = to_device(counts, self._device)
        seen = np.zeros(self._vocab_size, np.bool_)
        seen[prompt[prompt < self._vocab_size]] = True  # multimodal placeholders may lie above the vocabulary
        self.in_prompt[slot] = to_device(seen, self._device)

    def release(self, row: int) -> None:
        if self._slot[row] >= 0:
            self._free.append(int(self._slot[row]))
            self._slot[row] = -1

    def observe(self, rows: Int32Array, tokens: torch.Tensor) -> None:
        """`tokens`: [len(rows)] int64, one for each row."""
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self.output.index_put_((self.slots(rows), tokens), ones, accumulate=True)

    def _grow(self) -> None:
        old = self.output.shape[0]
        more = max(old, 4)
        self.output = torch.cat([self.output, self.output.new_zeros((more, self._vocab_size))])
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros((more, self._vocab_size))])
        self._free.extend(range(old + more - 1, old - 1, -1))


class SamplingState:
    """Sampling parameters and history of every admitted row."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, random_seed: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._unseeded = np.random.default_rng(np.random.SeedSequence(random_seed))
        self.needs = np.zeros(max_rows, np.int32)
        self.temperature = np.ones(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.presence_penalty = np.zeros(max_rows, np.float32)
        self.frequency_penalty = np.zeros(max_rows, np.float32)
        self.repetition_penalty = np.ones(max_rows, np.float32)
        self.min_tokens = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_logprobs = np.zeros(max_rows, np.int32)
        self.counts = TokenCounts(max_rows, vocab_size, self.device)
        self.stop_ids: dict[int, Int64Array] = {}  # MIN_TOKENS rows: what must not come yet
        self.bias: dict[int, tuple[Int64Array, npt.NDArray[np.float32]]] = {}
        self.allowed: dict[int, torch.Tensor] = {}  # [n] int64 on the device
        self.bad_words: dict[int, BadWords] = {}
        self.logprob_ids: dict[int, Int64Array] = {}

    def admit(
        self,
        row: int,
        params: SamplingParams,
        eos_ids: Iterable[int],
        prompt_token_ids: Int32Array,
        output_token_ids: Int32Array,
        sequence_index: int = 0,
    ) -> None:
        """Take a row into use. `output_token_ids`: tokens generated before a preemption, else empty.

        `sequence_index` tells siblings of one request (n > 1) apart, so that they draw different tokens from
        one seed.
        """
        assert self.needs[row] == 0, f"row {row} is in use"
        self.seed[row] = self._base_seed(params.seed, sequence_index)
        self.needs[row] = (
            self._admit_filters(row, params)
            | self._admit_bounds(row, params, eos_ids)
            | self._admit_history(row, params, prompt_token_ids, output_token_ids)
            | self._admit_logprobs(row, params)
        )

    def release(self, row: int) -> None:
        """The row is free for another sequence. Harmless for a row that is not in use."""
        needs = int(self.needs[row])
        self.needs[row] = 0
        if needs & PENALTIES:
            self.counts.release(row)
        if needs & (MIN_TOKENS | BIAS | ALLOWED | BAD_WORDS | LOGPROBS):
            self.stop_ids.pop(row, None)
            self.bias.pop(row, None)
            self.allowed.pop(row, None)
            self.bad_words.pop(row, None)
            self.logprob_ids.pop(row, None)

    def observe(self, rows: Int32Array, tokens: torch.Tensor) -> None:
        """Count the tokens just sampled. `rows` [S]; `tokens` [S] int64 on the device: nothing is read
        back.
        """
        needs = self.needs[rows]
        if not (int(np.bitwise_or.reduce(needs)) if len(needs) else 0) & OBSERVED:
            return
        counted = np.flatnonzero(needs & PENALTIES)
        if len(counted):
            self.counts.observe(rows[counted], tokens[to_device(counted, self.device)])
        for i in np.flatnonzero(needs & BAD_WORDS).tolist():
            self.bad_words[int(rows[i])].observe(tokens[i : i + 1])

    def _base_seed(self, seed: int | None, sequence_index: int) -> np.uint64:
        if seed is None:
            return np.uint64(self._unseeded.integers(0, 2**64, dtype=np.uint64))
        with np.errstate(over="ignore"):
            # Hash the user's seed first: neighbouring seeds must not give overlapping streams.
            mixed = mix64(np.array([seed % 2**64], np.uint64) + _GOLDEN)
            return np.uint64(mix64(mixed ^ (_GOLDEN * np.uint64(sequence_index)))[0])

    def _admit_filters(self, row: int, p: SamplingParams) -> int:
        if p.greedy:
            return 0
        self.temperature[row] = p.temperature
        self.top_k[row] = p.top_k if 0 < p.top_k < self.vocab_size else 0
        self.top_p[row] = p.top_p
        self.min_p[row] = p.min_p
        return (
            RANDOM
            | (TOP_K if self.top_k[row] else 0)
            | (TOP_P if p.top_p < 1.0 else 0)
            | (MIN_P if p.min_p > 0.0 else 0)
        )

    def _admit_bounds(self, row: int, p: SamplingParams, eos_ids: Iterable[int]) -> int:
        """min_tokens, logit_bias, allowed_token_ids. Ids above the vocabulary cannot be sampled and are
        dropped.
        """
        needs = 0
        if p.min_tokens > 0:
            ids = [t for t in {*eos_ids, *p.stop_token_ids} if 0 <= t < self.vocab_size]
            if ids:
                self.min_tokens[row] = p.min_tokens
                self.stop_ids[row] = np.array(sorted(ids), np.int64)
                needs |= MIN_TOKENS
        if p.logit_bias:
            pairs = sorted(p.logit_bias.items())
            self.bias[row] = (
                np.array([t for t, _ in pairs], np.int64),
                np.array([v for _, v in pairs], np.float32),
            )
            needs |= BIAS
        if p.allowed_token_ids is not None:
            self.allowed[row] = to_device(np.unique(np.array(p.allowed_token_ids, np.int64)), self.device)
            needs |= ALLOWED
        return needs

    def _admit_history(self, row: int, p: SamplingParams, prompt: Int32Array, output: Int32Array) -> int:
        needs = 0
        words = [w for w in p.bad_words_token_ids if w and 0 <= w[-1] < self.vocab_size]
        if words:
            self.bad_words[row] = BadWords.build(words, output, self.device)
            needs |= BAD_WORDS
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            self.presence_penalty[row] = p.presence_penalty
            self.frequency_penalty[row] = p.frequency_penalty
            self.repetition_penalty[row] = p.repetition_penalty
            self.counts.admit(row, prompt, output)
            needs |= PENALTIES
        return needs

    def _admit_logprobs(self, row: int, p: SamplingParams) -> int:
        if p.logprobs is None and not p.logprob_token_ids:
            return 0
        self.num_logprobs[row] = p.logprobs or 0
        self.logprob_ids[row] = np.array(p.logprob_token_ids, np.int64)
        return LOGPROBS
