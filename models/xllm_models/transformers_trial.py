"""A short trial before a network of transformers serves: chunks and mixed batches on the paged cache give what
transformers' own attention gives to whole sequences.

It finds what no declaration tells: state beside the cache, positions that the code counts itself, biases, patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from xllm_models.attention.base import AttentionBackend
from xllm_models.forward_input import AttentionMetadata, ForwardInput

if TYPE_CHECKING:
    from xllm_models.transformers_model import TransformersModel

# (sequence, its length after the step), decodes first: a prompt in two chunks, another beside the second, decodes
_STEPS = (((0, 13),), ((0, 16), (1, 7)), *(((0, 16 + i), (1, 7 + i)) for i in (1, 2, 3, 4)))
_LENGTHS = (20, 11)  # tokens of the two sequences
_CONTINUED = (slice(13, 20), slice(20 + 7, 20 + 11))  # tokens of both that an earlier step's cache stands behind
_SEED = 7
# Relative errors of hidden states that rounding explains: of the middle token, and of the worst, of which another
# expert may have taken care. Deep networks round more; then the difference between transformers' own two ways to
# attend says how much.
_MIDDLE = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 0.005}
_WORST = {torch.float32: 5e-3, torch.bfloat16: 0.8, torch.float16: 0.3}
_NOISE_FACTOR, _NOISE_LIMIT = 4, 0.1  # the limit is for the middle token's


@torch.inference_mode()
def run_trial(model: TransformersModel, backend: AttentionBackend) -> str:
    """What differs, or "". `backend` has no cache yet; it is given a small one."""
    spec, rng = backend.spec, np.random.default_rng(_SEED)
    width = -(-max(_LENGTHS) // spec.block_size)
    backend.allocate_kv_caches(1 + width * len(_LENGTHS))
    sequences = [torch.from_numpy(rng.integers(0, model.config.vocab_size, n)).to(spec.device) for n in _LENGTHS]
    expected = _reference(model, sequences, "eager")
    errors = _errors(expected, _paged(model, backend, sequences, width))
    noise = torch.zeros_like(errors)
    if not model.attention_needs:  # sdpa knows neither soft caps nor sinks
        noise = _errors(expected, _reference(model, sequences, "sdpa"))
    return _verdict(errors, noise, model.storage_dtype)


def _reference(model: TransformersModel, sequences: list[torch.Tensor], attention: str) -> torch.Tensor:
    """[tokens of both, hidden] float32"""
    return torch.cat([model.reference_hidden(tokens, attention).float() for tokens in sequences])


def _paged(model: TransformersModel, backend: AttentionBackend, sequences: list[torch.Tensor], width: int
           ) -> torch.Tensor:
    """The same through the cache, step by step."""
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    lengths = [0] * len(sequences)
    for step in _STEPS:
        rows = [(sequence, lengths[sequence], end) for sequence, end in step]
        input = _input(rows, sequences, width, backend.spec.block_size)
        backend.prepare(input.attention)
        hidden = model(input).float()
        for (sequence, _, end), part in zip(rows, hidden.split([end - begin for _, begin, end in rows])):
            found[sequence].append(part)
            lengths[sequence] = end
    return torch.cat([torch.cat(parts) for parts in found])


def _input(rows: list[tuple[int, int, int]], sequences: list[torch.Tensor], width: int, block: int) -> ForwardInput:
    """rows of (sequence, first position, end); sequence i lies in blocks 1 + i * width and on."""
    device = sequences[0].device
    counts = [end - begin for _, begin, end in rows]
    decodes = sum(count == 1 for count in counts)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lengths = np.array([end for _, _, end in rows], np.int32)
    tables = np.array([[1 + s * width + i for i in range(width)] for s, _, _ in rows], np.int32)
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in rows])
    slots = np.concatenate([(1 + s * width) * block + np.arange(begin, end) for s, begin, end in rows])
    metadata = AttentionMetadata(
        num_decodes=decodes, num_prefills=len(rows) - decodes, query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device), block_table=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device), query_start_host=starts, seq_lens_host=lengths,
        max_seq_len=int(lengths.max()))
    tokens = torch.cat([sequences[s][begin:end] for s, begin, end in rows])
    return ForwardInput(tokens, torch.from_numpy(positions).to(device), metadata)


def _errors(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """expected, found [T, hidden] float32 -> [T] relative errors; what is no number is infinitely wrong."""
    scale = expected.norm(dim=1).clamp_min(1e-6)
    return ((found - expected).norm(dim=1) / scale).nan_to_num(float("inf"))


def _verdict(errors: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype) -> str:
    """errors, noise [T]. Tokens that continue a cache are looked at for themselves: there are fewer of them."""
    continued = torch.zeros(errors.shape[0], dtype=torch.bool, device=errors.device)
    for part in _CONTINUED:
        continued[part] = True
    fine = float(errors.max()) <= max(_WORST[dtype], _NOISE_FACTOR * float(noise.max()))
    for tokens in (continued, ~continued):
        rounding = min(float(noise[tokens].median()), _NOISE_LIMIT)
        fine = fine and float(errors[tokens].median()) <= max(_MIDDLE[dtype], _NOISE_FACTOR * rounding)
    if fine:
        return ""
    return ("in chunks on the paged KV cache it computes something else than in one piece "
            f"(up to {float(errors.max()):.0%} off), because its code keeps state, counts positions, or adds to "
            "attention in a way of its own")
