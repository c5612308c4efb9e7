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

_LENGTHS = (23, 10)  # tokens of the two sequences
_STEPS = (((0, 13),), ((0, 22), (1, 9)), ((0, 23), (1, 10)))  # (sequence, its length after the step), decodes first
_SEED = 7
# Largest and middle relative error of a token's hidden state. Rounded arithmetic differs more, and a token of which
# another expert takes care differs much.
_TOLERANCE = {torch.float32: (5e-3, 1e-4), torch.bfloat16: (0.5, 0.1), torch.float16: (0.3, 0.05)}


@torch.inference_mode()
def run_trial(model: TransformersModel, backend: AttentionBackend) -> str:
    """What differs, or "". `backend` has no cache yet; it is given a small one."""
    spec = backend.spec
    width = -(-max(_LENGTHS) // spec.block_size)
    backend.allocate_kv_caches(1 + width * len(_LENGTHS))
    rng = np.random.default_rng(_SEED)
    sequences = [torch.from_numpy(rng.integers(0, model.config.vocab_size, n)).to(spec.device) for n in _LENGTHS]
    expected = [model.reference_hidden(tokens).float() for tokens in sequences]
    found = [torch.empty_like(hidden) for hidden in expected]
    lengths = [0] * len(sequences)
    for step in _STEPS:
        rows = [(sequence, lengths[sequence], end) for sequence, end in step]
        input = _input(rows, sequences, width, spec.block_size)
        backend.prepare(input.attention)
        hidden = model(input).float()
        for (sequence, begin, end), part in zip(rows, hidden.split([end - begin for _, begin, end in rows])):
            found[sequence][begin:end] = part
            lengths[sequence] = end
    return _difference(torch.cat(expected), torch.cat(found), _TOLERANCE[model.storage_dtype])


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


def _difference(expected: torch.Tensor, found: torch.Tensor, tolerance: tuple[float, float]) -> str:
    """expected, found [T, hidden] float32"""
    scale = expected.norm(dim=1).clamp_min(1e-6)
    errors = ((found - expected).norm(dim=1) / scale).nan_to_num(float("inf"))
    if errors.max() <= tolerance[0] and errors.median() <= tolerance[1]:
        return ""
    return ("in chunks on the paged KV cache it computes something else than in one piece "
            f"(up to {float(errors.max()):.0%} off), because its code keeps state, counts positions, or adds to "
            "attention in a way of its own")
