"""Changes to logits that come before temperature, in place, for the rows that ask.

Order (vLLM's, and transformers' where it has them): the grammar, allowed_token_ids, bad_words, min_tokens, logit_bias,
then repetition_penalty (prompt and output tokens), frequency_penalty, presence_penalty (output tokens). They
bind greedy rows as well. Where what forbids tokens leaves nothing of what a grammar allows, the grammar decides
alone. Reads nothing back to the host. Knows no temperature and no random numbers.
"""

from __future__ import annotations

import numpy as np
import torch

from xllm_npu.execution.constrained_decoding import GrammarMask
from xllm_npu.execution.sampling_state import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    MIN_TOKENS,
    PENALTIES,
    PROCESSORS,
    Int32Array,
    Int64Array,
    SamplingState,
    to_device,
)

MASKED = float("-inf")


def apply_grammar(
    logits: torch.Tensor, grammar: GrammarMask, state: SamplingState, rows: Int32Array, num_output: Int32Array,
    needs: Int32Array,
) -> None:
    """The grammar's mask, and then the processors, for all rows; arguments as for `apply_processors`.

    A complete grammar allows a stop token alone, which min_tokens forbids, and a constant need not consist of
    allowed_token_ids. A row that would be left without a token keeps what the grammar allows.
    """
    grammar.apply(logits)
    if not int(np.bitwise_or.reduce(needs)) & PROCESSORS:
        return
    narrowed = grammar.positions[(needs[grammar.positions] & (ALLOWED | BAD_WORDS | MIN_TOKENS)) != 0]
    index = to_device(narrowed, logits.device)
    whole = logits[index]  # [K, V], a copy
    apply_processors(logits, state, rows, num_output, needs)
    if len(narrowed):
        part = logits[index]
        nothing = (part == MASKED).all(dim=1, keepdim=True)  # [K, 1]
        logits[index] = torch.where(nothing, whole, part)


def apply_processors(
    logits: torch.Tensor, state: SamplingState, rows: Int32Array, num_output: Int32Array, needs: Int32Array
) -> None:
    """`logits` [S, V] float32, changed in place; `rows`, `num_output` and `needs` [S], one for each row of
    logits.
    """
    for i in np.flatnonzero(needs & ALLOWED).tolist():
        _keep_only(logits[i], state.allowed[int(rows[i])])
    for i in np.flatnonzero(needs & BAD_WORDS).tolist():
        words = state.bad_words[int(rows[i])]
        _mask_where(logits[i], words.last, words.forbidden_now())
    early = np.flatnonzero(((needs & MIN_TOKENS) != 0) & (num_output < state.min_tokens[rows]))
    if len(early):
        _mask_stops(logits, early, [state.stop_ids[int(rows[i])] for i in early])
    biased = np.flatnonzero(needs & BIAS)
    if len(biased):
        _add_bias(logits, biased, [state.bias[int(rows[i])] for i in biased])
    penalised = np.flatnonzero(needs & PENALTIES)
    if len(penalised):
        _penalise(logits, state, penalised, rows[penalised])


def _keep_only(row: torch.Tensor, ids: torch.Tensor) -> None:
    """`row` [V], `ids` [n] int64."""
    kept = row[ids]
    row.fill_(MASKED)
    row[ids] = kept


def _mask_where(row: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """`row` [V]; masks ids[chosen] without asking the host which those are. An id may stand in `ids`
    twice.
    """
    bound = torch.where(chosen, MASKED, float("inf"))
    row.scatter_reduce_(0, ids, bound, reduce="amin")


def _flat(
    positions: Int64Array, ids: list[Int64Array], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index tensors of all (row, id) pairs: [n] int64 each."""
    rows = np.repeat(positions, [len(x) for x in ids])
    return to_device(rows, device), to_device(np.concatenate(ids), device)


def _mask_stops(logits: torch.Tensor, positions: Int64Array, ids: list[Int64Array]) -> None:
    logits[_flat(positions, ids, logits.device)] = MASKED


def _add_bias(logits: torch.Tensor, positions: Int64Array, bias: list[tuple[Int64Array, np.ndarray]]) -> None:
    index = _flat(positions, [ids for ids, _ in bias], logits.device)
    values = to_device(np.concatenate([v for _, v in bias]), logits.device)
    logits.index_put_(index, values, accumulate=True)


def _penalise(logits: torch.Tensor, state: SamplingState, positions: Int64Array, rows: Int32Array) -> None:
    index = to_device(positions, logits.device)
    slots = state.counts.slots(rows)
    counts = state.counts.output[slots]  # [K, V] int32
    used = counts > 0  # [K, V]
    x = logits[index]  # [K, V], a copy
    if (state.repetition_penalty[rows] != 1.0).any():
        penalty = _column(state.repetition_penalty, rows, logits.device)
        seen = used | state.counts.in_prompt[slots]
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if state.frequency_penalty[rows].any():
        x -= _column(state.frequency_penalty, rows, logits.device) * counts
    if state.presence_penalty[rows].any():
        x -= _column(state.presence_penalty, rows, logits.device) * used
    logits[index] = x


def _column(values: np.ndarray, rows: Int32Array, device: torch.device) -> torch.Tensor:
    """[len(rows), 1] on the device."""
    return to_device(values[rows], device).unsqueeze(1)
