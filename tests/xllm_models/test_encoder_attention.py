"""Packed attention both ways against one masked product, and MPNet's distance buckets against transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xllm_models.attention.encoder_attention import EncoderAttention, block_diagonal
from xllm_models.encoder import distance_buckets
from xllm_models.forward_input import AttentionMetadata


def metadata_of(lengths: list[int]) -> AttentionMetadata:
    start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    none = torch.zeros(0, dtype=torch.int32)
    return AttentionMetadata(0, len(lengths), none, none, none, none, start, np.array(lengths, np.int32), max(lengths))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [5, 1, 9, 9, 3, 9], [40, 2]])
def test_sequences_see_themselves_alone(lengths: list[int], biased: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, sum(lengths), 4, 16).unbind(0)
    table = torch.randn(4, 64, 64)
    bias = (lambda n: table[:, :n, :n]) if biased else None
    backend = EncoderAttention()
    backend.prepare(metadata_of(lengths))
    found = backend.forward(query, key, value, 0.3, bias)
    torch.testing.assert_close(found, block_diagonal(query, key, value, lengths, 0.3, bias), atol=1e-5, rtol=1e-5)


def test_distance_buckets_are_transformers() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    at = torch.arange(300)
    expected = MPNetEncoder.relative_position_bucket(at[None, :] - at[:, None], num_buckets=32)
    assert torch.equal(distance_buckets(300, 32, torch.device("cpu")), expected)
