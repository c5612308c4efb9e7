"""From logits to one token a row, vectorised over the batch.

Order: processors (execution.logits_processor), then for rows that are not greedy temperature, min_p, top_k,
top_p, then the draw. min_p, top_k and top_p each amount to a floor under which a logit is dropped, so the
strictest of the floors is applied once; tokens tied at a floor are all kept, as transformers keeps them for
top_k. (For top_p: a token is kept if the tokens strictly more likely than it have less than p of the mass.)
Rows that need nothing pay nothing.

The draw depends on the row's seed, its output index and its logits only: not on the batch, preemption or
overlap. Greedy ties go to the lowest id. A NaN logit counts as -inf, +inf as the largest float; a row with
no finite logit left, before or after the processors, is reported in `bad_rows` and its token is meaningless
(but a valid id).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from xllm_npu.execution.constrained_decoding import GrammarMask
from xllm_npu.execution.logits_processor import apply_grammar, apply_processors
from xllm_npu.execution.logprobs import DeviceLogprobs, SampleLogprobs, measure
from xllm_npu.execution.sampling_state import (
    LOGPROBS,
    MIN_P,
    PROCESSORS,
    RANDOM,
    TOP_K,
    TOP_P,
    Int32Array,
    SamplingState,
    to_device,
    uniforms,
)

_BLOCK = 256  # tokens summed together in the first stage of the draw
_TOP_P_CANDIDATES = 1024  # how many top_p looks at before it sorts them all, where host reads are free
_LARGEST = torch.finfo(torch.float32).max
_LOWEST = float("-inf")


@dataclass(slots=True)
class HostSample:
    """One step's result as numpy arrays."""

    tokens: Int32Array  # [S]
    bad_rows: npt.NDArray[np.bool_]  # [S] the model or the processors left nothing to choose from
    logprobs: SampleLogprobs | None  # of the rows that asked


@dataclass(slots=True)
class SampleResult:
    """One step's result on the device; nothing has been read back yet."""

    tokens: torch.Tensor  # [S] int64, always valid ids
    bad_rows: torch.Tensor  # [S] bool
    logprobs: DeviceLogprobs | None

    def to_host(self) -> HostSample:
        """Waits for the device. One copy, but for log probabilities: bad rows come as ~token, which is < 0."""
        marked = torch.where(self.bad_rows, ~self.tokens, self.tokens).to(torch.int32).cpu().numpy()
        bad = marked < 0
        return HostSample(
            tokens=np.where(bad, ~marked, marked),
            bad_rows=bad,
            logprobs=self.logprobs.to_host() if self.logprobs else None,
        )


class Sampler:
    """Chooses tokens by what `state` knows of the rows. Call `state.observe` with the result's tokens
    afterwards.
    """

    def __init__(self, state: SamplingState, host_reads: bool | None = None) -> None:
        """`host_reads`: looking at a value in the middle of the work costs nothing (the device runs no
        stream).

        Then work that the values turn out not to need is skipped; the results are the same. Default: if the
        state's tensors lie in host memory.
        """
        self._state = state
        self._host_reads = state.device.type == "cpu" if host_reads is None else host_reads

    def sample(
        self, logits: torch.Tensor, rows: Int32Array, num_output: Int32Array, grammar: GrammarMask | None = None
    ) -> SampleResult:
        """`logits` [S, V] float32, may be overwritten. `rows` [S]: batch-table rows. `num_output` [S]:
        tokens each sequence had generated before this one. `grammar`: what the rows that have one may choose.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[1] == self._state.vocab_size
        needs = self._state.needs[rows]
        union = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        logits, top, tokens = self._clean_maximum(logits)
        raw = self._keep_raw(logits, needs) if union & LOGPROBS else None
        if grammar is not None:
            apply_grammar(logits, grammar, self._state, rows, num_output, needs)
        elif union & PROCESSORS:
            apply_processors(logits, self._state, rows, num_output, needs)
        if grammar is not None or union & PROCESSORS:
            top, tokens = logits.max(1)
        bad = top == _LOWEST
        if union & RANDOM:
            drawn = np.flatnonzero(needs & RANDOM)
            index = self._to_device(drawn)
            chosen = self._draw(logits[index], top[index], rows[drawn], num_output[drawn], needs[drawn])
            # A bad row's arithmetic is NaN all along; it keeps the maximum's id, which is valid.
            tokens = tokens.index_copy(0, index, torch.where(bad[index], tokens[index], chosen))
        return SampleResult(tokens, bad, self._logprobs(raw, rows, needs, tokens))

    def _clean_maximum(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits without NaN and +inf, their maximum [S], its lowest id [S]).

        A row's maximum is NaN if any of its logits is, so one look at the maxima tells whether there is work
        to do.
        """
        if self._host_reads:
            top, tokens = logits.max(1)
            if not bool((torch.isnan(top) | (top == float("inf"))).any()):
                return logits, top, tokens
        logits = torch.nan_to_num(logits, nan=_LOWEST, posinf=_LARGEST, neginf=_LOWEST)
        return logits, *logits.max(1)

    def _draw(
        self,
        x: torch.Tensor,
        top: torch.Tensor,
        rows: Int32Array,
        num_output: Int32Array,
        needs: Int32Array,
    ) -> torch.Tensor:
        """`x` [R, V], a copy to work in; `top` [R] its maxima. -> [R] int64."""
        state = self._state
        temperature = self._to_device(state.temperature[rows]).unsqueeze(1)
        x = x.div_(temperature).clamp_(max=_LARGEST)  # a tiny temperature must not overflow to inf - inf
        top = top.unsqueeze(1).div(temperature).clamp_(max=_LARGEST)  # [R, 1]; division keeps the order
        x -= top  # [R, V] <= 0
        if int(np.bitwise_or.reduce(needs)) & (MIN_P | TOP_K | TOP_P):
            floor = self._floor(x, rows, needs)
            x.masked_fill_(x < floor, _LOWEST)
        pair = self._to_device(uniforms(state.seed[rows], num_output))
        return _inverse_cdf(x.exp_(), pair)

    def _floor(self, x: torch.Tensor, rows: Int32Array, needs: Int32Array) -> torch.Tensor:
        """[R, 1]: logits (relative to the row's maximum) under it are dropped."""
        state = self._state
        # log(0) = -inf: no floor. In float32, as the logits are: min_p = 1 must keep the maximum itself.
        with np.errstate(divide="ignore"):
            floor = self._to_device(np.log(np.where(needs & MIN_P, state.min_p[rows], 0)).astype(np.float32))
        floor = floor.unsqueeze(1)
        sorting = np.flatnonzero(needs & (TOP_K | TOP_P))
        if not len(sorting):
            return floor
        every = len(sorting) == len(rows)
        index = self._to_device(sorting)
        part, low = (x, floor) if every else (x[index], floor[index])
        low = self._sorted_floor(part, low, rows[sorting], needs[sorting])
        return low if every else floor.index_copy(0, index, low)

    def _sorted_floor(
        self, x: torch.Tensor, floor: torch.Tensor, rows: Int32Array, needs: Int32Array
    ) -> torch.Tensor:
        """Raise `floor` [R, 1] for top_k, then top_p; every row asks for at least one of them. `x` [R, V]."""
        vocab = x.shape[1]
        k = np.where(needs & TOP_K, self._state.top_k[rows], 0)
        p = np.where(needs & TOP_P, self._state.top_p[rows], 2.0).astype(np.float32)  # 2: never reached
        unbounded = ((needs & TOP_P) != 0) & (k == 0)  # top_p may have to look at any token
        width = int(k.max())
        if (needs & TOP_P).any():
            width = max(width, _TOP_P_CANDIDATES)
        if unbounded.any() and not self._host_reads:
            width = vocab
        best = x.topk(min(width, vocab), dim=1).values  # [R, width], sorted
        kth = best.gather(1, self._to_device(np.maximum(k - 1, 0)).unsqueeze(1))
        bounded = self._to_device(k > 0).unsqueeze(1)
        floor = torch.where(bounded, torch.maximum(floor, kth), floor)
        if not (needs & TOP_P).any():
            return floor
        target = _mass_above(x, floor) * self._to_device(p).unsqueeze(1)  # [R, 1]
        floor, reached = _nucleus(best, floor, target)
        if self._host_reads and best.shape[1] < vocab:
            short = np.flatnonzero(unbounded & ~reached.numpy(force=True)[:, 0])
            if len(short):
                index = self._to_device(short)
                whole = x[index].sort(dim=1, descending=True).values
                floor[index] = _nucleus(whole, floor[index], target[index])[0]
        return floor

    def _keep_raw(self, logits: torch.Tensor, needs: Int32Array) -> torch.Tensor:
        return logits[self._to_device(np.flatnonzero(needs & LOGPROBS))]  # [R, V], a copy

    def _logprobs(
        self, raw: torch.Tensor | None, rows: Int32Array, needs: Int32Array, tokens: torch.Tensor
    ) -> DeviceLogprobs | None:
        if raw is None:
            return None
        asking = np.flatnonzero(needs & LOGPROBS)
        asking_rows = rows[asking]
        asked = [self._state.logprob_ids[r] for r in asking_rows.tolist()]
        num_top = self._state.num_logprobs[asking_rows].astype(np.int64)
        return measure(raw, tokens[self._to_device(asking)], asking_rows, num_top, asked)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self._state.device)


def _mass_above(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the sum of exp(x) over x >= floor, in blocks so that it does not depend on how many rows there
    are.
    """
    weights = x.exp().masked_fill_(x < floor, 0.0)
    return _block_sums(weights)[1].sum(1, keepdim=True, dtype=torch.float32)


def _nucleus(
    best: torch.Tensor, floor: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raise `floor` [R, 1] to the logit at which the mass reaches `target` [R, 1]; and whether it does so.

    `best` [R, width]: the likeliest logits, sorted descending. Unreached, the floor stays as it was.
    """
    mass = best.exp().masked_fill_(best < floor, 0.0).cumsum(1)
    short = mass < target  # [R, width] True, ..., True, False, ...
    at = short.sum(1, keepdim=True)
    reached = at < best.shape[1]
    logit = best.gather(1, at.clamp(max=best.shape[1] - 1))
    return torch.where(reached, torch.maximum(floor, logit), floor), reached


def _block_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weights` [R, V] -> ([R, blocks, _BLOCK], their sums [R, blocks]); zeros pad the last block."""
    count, vocab = weights.shape
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(count, -1, _BLOCK)
    return blocks, blocks.sum(2)


def _inverse_cdf(weights: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Draw from `weights` [R, V] (not normalised) with the uniforms `pair` [R, 2]; -> [R] int64.

    Two stages, a block and then a token of it, each with a uniform of its own: in float32 one running sum
    over a vocabulary would round away what an unlikely token has. Never returns a token of weight zero.
    """
    blocks, sums = _block_sums(weights)
    block = _pick(sums, pair[:, :1])  # [R, 1]
    within = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)  # [R, _BLOCK]
    return (block * _BLOCK + _pick(within, pair[:, 1:])).squeeze(1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[R, n] and [R, 1] -> [R, 1] int64: the first index whose running sum exceeds uniform * total."""
    running = weights.cumsum(1)
    at = (running <= uniform * running[:, -1:]).sum(1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    # Rounding can put the target at the very end, or a parallel scan can be off by an ulp: then take the
    # largest.
    return torch.where(weights.gather(1, at) > 0, at, weights.argmax(1, keepdim=True))
