"""A model of this project on any device without the engine: greedy decoding over the paged cache, eager or by graph.

Rows have blocks of their own, in shuffled order, so that a wrong block table shows. Letters as in
xllm_models.forward_input: B rows, T query tokens, M blocks of a row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.backends import attention_for
from xllm_models.config import ModelConfig
from xllm_models.forward_input import AttentionMetadata, ForwardInput
from xllm_models.llama import LlamaForCausalLM
from xllm_models.registry import build_model
from xllm_models.weights.loader import load_weights
from xllm_models.weights.source import open_source
from xllm_platform.base import Graph, Platform


def load_model(platform: Platform, directory: Path, dtype: torch.dtype, kernels: str = "") -> LlamaForCausalLM:
    """With the checkpoint's weights; `kernels`: an operator set other than the platform's."""
    model = build_model(ModelConfig.from_dir(directory), dtype=dtype, device=platform.device(),
                        kernels=kernels or platform.capabilities.kernels)
    load_weights(model, open_source(directory))
    return model


def random_model(platform: Platform, config: ModelConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """With random weights made on the device; vectors (norms) are 1."""
    model = build_model(config, dtype=dtype, device=platform.device(), kernels=platform.capabilities.kernels)
    platform.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1)
        else:
            parameter.data.uniform_(-0.02, 0.02)
    model.finalize_weights()
    return model


class PagedDecoder:
    def __init__(
        self, platform: Platform, model: LlamaForCausalLM, attention: str, *, rows: int, longest: int, block_size: int
    ) -> None:
        """`longest`: tokens that a row may have."""
        self._platform, self._model, self._block_size = platform, model, block_size
        device, width = platform.device(), -(-longest // block_size)
        backend = attention_for(model.config, attention)
        self.attention: PagedBackend = backend(model.attention_spec(block_size))
        self.attention.allocate_kv_caches(1 + rows * width)
        self.attention.warmup()
        model.bind_attention(self.attention)
        model.reserve_positions(longest)
        order = np.random.default_rng(0).permutation(rows * width) + 1
        self._table = order.reshape(rows, width).astype(np.int32)  # [B, M]; block 0 is the dummy
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions, self._slots = torch.zeros_like(self._tokens), torch.zeros_like(self._tokens)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._block_table = torch.from_numpy(self._table).to(device)
        self._graphs: dict[int, Graph] = {}
        self._graph_backend = None

    def greedy(self, prompts: list[list[int]], steps: int, graph: bool = False) -> list[list[int]]:
        """The `steps` likeliest tokens after each prompt; prompts go one by one, their decodes together."""
        tokens = [self._prefill(row, prompt) for row, prompt in enumerate(prompts)]
        answers = [[token] for token in tokens]
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        for _ in range(steps - 1):
            lengths += 1
            tokens = self.decode(tokens, lengths, graph).tolist()
            for answer, token in zip(answers, tokens):
                answer.append(token)
        return answers

    def decode(self, tokens: list[int], lengths: np.ndarray, graph: bool) -> torch.Tensor:
        """One step: a token for each of the first B rows -> the next tokens, [B] int64."""
        input = self.decode_input(tokens, lengths, graph)
        return self.replay(input) if graph else self.forward(input)

    def decode_input(self, tokens: list[int], lengths: np.ndarray, graph: bool) -> ForwardInput:
        """`lengths` [B] int32 count the new tokens. Every input of B rows lies in the same device memory."""
        rows = lengths.size
        positions = lengths.astype(np.int64) - 1
        blocks = self._table[np.arange(rows), positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        for target, values in ((self._tokens, np.array(tokens, np.int64)), (self._positions, positions),
                               (self._slots, slots), (self._seq_lens, lengths)):  # fmt: skip
            target[:rows].copy_(torch.from_numpy(values))
        metadata = AttentionMetadata(
            num_decodes=rows, num_prefills=0, query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows], block_table=self._block_table[:rows], slot_mapping=self._slots[:rows],
            query_start_host=np.arange(rows + 1, dtype=np.int32), seq_lens_host=lengths.copy(),
            max_seq_len=int(lengths.max()), as_graph=graph)
        return ForwardInput(self._tokens[:rows], self._positions[:rows], metadata)

    @torch.inference_mode()
    def forward(self, input: ForwardInput) -> torch.Tensor:
        with self._platform.inference_context():
            self.attention.prepare(input.attention)
            return self._next_tokens(input)

    @torch.inference_mode()
    def replay(self, input: ForwardInput) -> torch.Tensor:
        """Through the graph of this many rows, captured at its first use."""
        rows = input.token_ids.shape[0]
        with self._platform.inference_context():
            if rows not in self._graphs:
                if self._graph_backend is None:
                    self._graph_backend = self._platform.graph_backend()
                    self._graph_backend.prepare_model(self._model)
                self.attention.prepare(input.attention)
                self._graphs[rows] = self._graph_backend.capture(lambda: self._next_tokens(input))
            self.attention.prepare(input.attention)
            return self._graphs[rows].replay()

    @torch.inference_mode()
    def _prefill(self, row: int, prompt: list[int]) -> int:
        count, device = len(prompt), self._platform.device()
        positions = np.arange(count)
        slots = self._table[row, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        start, length = np.array([0, count], np.int32), np.array([count], np.int32)
        decodes = int(count == 1)
        metadata = AttentionMetadata(
            num_decodes=decodes, num_prefills=1 - decodes, query_start=torch.from_numpy(start).to(device),
            seq_lens=torch.from_numpy(length).to(device), block_table=self._block_table[row : row + 1],
            slot_mapping=torch.from_numpy(slots).to(device), query_start_host=start, seq_lens_host=length,
            max_seq_len=count)
        input = ForwardInput(torch.tensor(prompt, device=device), torch.from_numpy(positions).to(device), metadata)
        with self._platform.inference_context():
            self.attention.prepare(metadata)
            return int(self._model.compute_logits(self._model(input)[-1:]).argmax())

    def _next_tokens(self, input: ForwardInput) -> torch.Tensor:
        return self._model.compute_logits(self._model(input)).argmax(-1)
