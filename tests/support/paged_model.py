"""Drives a model through the paged cache as an input builder would: shuffled blocks, mixed batches, any chunking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from xllm_models.backends import attention_for
from xllm_models.forward_input import AttentionMetadata, ForwardInput
from xllm_models.registry import build_model, read_model_config
from xllm_models.weights.loader import load_weights
from xllm_models.weights.source import open_source
from xllm_platform.parallel import ParallelState


class BlockTables:
    """Hands out blocks of a shuffled pool (block 0 excepted) and writes attention metadata."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self._free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def metadata(self, rows: list[tuple[int, int]]) -> tuple[AttentionMetadata, np.ndarray]:
        """rows of (sequence, new tokens), one-token rows first -> metadata and the tokens' positions."""
        counts = [n for _, n in rows]
        decodes = next((i for i, n in enumerate(counts) if n > 1), len(rows))
        positions, slots = [], []
        for sequence, n in rows:
            begin = self.lengths.get(sequence, 0)
            self.lengths[sequence] = begin + n
            table = self.tables.setdefault(sequence, [])
            while len(table) * self.block_size < begin + n:
                table.append(self._free.pop())
            for p in range(begin, begin + n):
                positions.append(p)
                slots.append(table[p // self.block_size] * self.block_size + p % self.block_size)
        width = max(len(self.tables[s]) for s, _ in rows) + 1
        table_rows = np.zeros((len(rows), width), np.int32)
        for i, (sequence, _) in enumerate(rows):
            table_rows[i, : len(self.tables[sequence])] = self.tables[sequence]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = np.array([self.lengths[s] for s, _ in rows], np.int32)
        metadata = AttentionMetadata(
            num_decodes=decodes, num_prefills=len(rows) - decodes, query_start=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lengths), block_table=torch.from_numpy(table_rows),
            slot_mapping=torch.tensor(slots), query_start_host=starts, seq_lens_host=lengths,
            max_seq_len=int(lengths.max()))
        return metadata, np.array(positions)


class PagedModel:
    def __init__(
        self, directory: str | Path, *, dtype: torch.dtype = torch.float32, kernels: str = "cpu",
        attention: str = "numba",
        block_size: int = 16, num_blocks: int = 64, parallel: ParallelState | None = None, model_impl: str = "native",
    ) -> None:
        config = read_model_config(Path(directory), model_impl)
        self.model = build_model(config, dtype=dtype, kernels=kernels, parallel=parallel)
        self.report = load_weights(self.model, open_source(directory))
        self.backend = attention_for(self.model.config, attention)(self.model.attention_spec(block_size))
        self.backend.allocate_kv_caches(num_blocks)
        self.model.bind_attention(self.backend)
        self.blocks = BlockTables(num_blocks, block_size)
        self.forward = self.model.forward
        self.second_rotation = False  # of all sequences, where the model has two (see layers.rotary)

    def input(self, rows: list[tuple[int, list[int]]]) -> ForwardInput:
        metadata, positions = self.blocks.metadata([(s, len(tokens)) for s, tokens in rows])
        if self.model.rotary_switch:
            positions = 2 * positions + self.second_rotation
        tokens = torch.tensor([t for _, row in rows for t in row])
        return ForwardInput(tokens, torch.from_numpy(positions), metadata)

    def dummy_row(self) -> tuple[int, list[int]]:
        """One token on block 0, as a rank without work steps along with the others."""
        self.blocks.tables[-1], self.blocks.lengths[-1] = [0], 0
        return -1, [0]

    @torch.inference_mode()
    def logits(self, rows: list[tuple[int, list[int]]], dp_tokens: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """rows of (sequence, new tokens) -> for each row its new tokens' logits, [n, vocab]."""
        input = self.input(rows)
        input.dp_tokens = dp_tokens
        self.backend.prepare(input.attention)
        logits = self.model.compute_logits(self.forward(input))
        return list(logits.split([len(tokens) for _, tokens in rows]))
