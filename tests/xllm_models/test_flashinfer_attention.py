"""The FlashInfer backend over a stand-in for the library: which plans it makes, and with which page tables."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.attention.flashinfer_attention import FlashInferAttention
from xllm_models.backends import get_attention

from tests.support import fake_flashinfer
from tests.support.paged_model import BlockTables

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 4, 2, 64, 64
LAYERS = (LayerAttention(0, 0.125), LayerAttention(1, 0.125, sliding_window=20, softcap=4.0))


class Pair:
    """The backend and the reference, fed the same steps."""

    def __init__(self) -> None:
        spec = AttentionSpec(2, HEADS, KV_HEADS, HEAD_DIM, 16, torch.bfloat16, torch.device("cpu"))
        self.ours, self.reference = get_attention("flashinfer")(spec), get_attention("torch")(spec)
        for backend in (self.ours, self.reference):
            backend.allocate_kv_caches(NUM_BLOCKS)
        self.blocks = BlockTables(NUM_BLOCKS, 16)
        torch.manual_seed(0)

    def step(self, rows, graph_rows=0, width=8):
        """rows of (sequence, new tokens); `graph_rows`: padded to so many, with a table of `width` columns."""
        metadata, _ = self.blocks.metadata(rows)
        if graph_rows:
            more = graph_rows - len(rows)
            table = torch.zeros(graph_rows, width, dtype=torch.int32)
            table[: len(rows), : metadata.block_table.shape[1]] = metadata.block_table
            metadata.block_table, metadata.as_graph, metadata.num_decodes = table, True, graph_rows
            metadata.seq_lens_host = np.append(metadata.seq_lens_host, np.ones(more, np.int32))
            metadata.query_start_host = np.arange(graph_rows + 1, dtype=np.int32)
            metadata.slot_mapping = torch.cat((metadata.slot_mapping, torch.zeros(more, dtype=torch.int64)))
        tokens = int(metadata.query_start_host[-1])
        for backend in (self.ours, self.reference):
            backend.prepare(metadata)
        for layer in LAYERS:
            qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
            parts = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            found, expected = self.ours.forward(layer, *parts), self.reference.forward(layer, *parts)
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "made", [])
    return Pair()


def test_prompts_chunks_and_decodes(pair: Pair) -> None:
    pair.step([(0, 33), (1, 17), (2, 2)])
    pair.step([(3, 1), (0, 1), (1, 31), (4, 16)])  # decodes beside a chunk on a prefix and a prompt
    pair.step([(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)])
    pair.step([(4, 1)])


def test_a_graph_has_wrappers_of_its_own_for_each_size(pair: Pair) -> None:
    pair.step([(0, 33), (1, 17)])
    pair.step([(0, 1), (1, 1)], graph_rows=4)
    pair.step([(0, 1)], graph_rows=2)
    pair.step([(0, 1), (1, 1)], graph_rows=4)
    pair.step([(0, 1), (1, 1)])
    made = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    kinds = len(LAYERS)
    assert [wrapper.graph for wrapper in made] == [True] * 2 * kinds + [False] * kinds
    assert [wrapper.plans for wrapper in made] == [2] * kinds + [1] * 2 * kinds, "each replay has a new plan"


def test_a_replay_needs_nothing_but_prepare(pair: Pair) -> None:
    """What a graph does again is `run`: its wrappers must hold the new step's plan once `prepare` has returned."""
    pair.step([(0, 30), (1, 17)])
    pair.step([(0, 1), (1, 1)], graph_rows=2)
    wrappers = list(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made)
    for _ in range(3):  # row 0 grows into its third block
        metadata, _ = pair.blocks.metadata([(0, 1), (1, 1)])
        metadata.as_graph, metadata.block_table = True, torch.nn.functional.pad(
            metadata.block_table, (0, 8 - metadata.block_table.shape[1]))
        for backend in (pair.ours, pair.reference):
            backend.prepare(metadata)
        query, key, value = (torch.randn(2, n, HEAD_DIM).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
        for layer, wrapper in zip(LAYERS, wrappers):
            expected = pair.reference.forward(layer, query, key, value)
            pair.ours.write(layer.layer, key, value)
            cache = pair.ours.key_caches[layer.layer], pair.ours.value_caches[layer.layer]
            torch.testing.assert_close(wrapper.run(query, cache).flatten(1), expected, rtol=1e-2, atol=1e-2)


def test_it_says_what_it_can() -> None:
    assert FlashInferAttention.capture_safe
    assert "sinks" not in FlashInferAttention.features
    assert torch.float32 not in FlashInferAttention.dtypes
