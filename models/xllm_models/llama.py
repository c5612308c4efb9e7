"""Llama (1 to 3.x) and everything of its shape: pre-norm decoder, rotary attention with grouped keys, gated MLP.

The configuration says what a relative adds (biases, head norms, windows), so the other architectures here are this
class under their own names. The runner calls `backend.prepare(input.attention)` before each `forward`: preparing is
host work, which a captured graph must not contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import nn
from xllm_platform.parallel import ParallelState

from xllm_models.attention.base import AttentionSpec, PagedBackend
from xllm_models.attention.mla_base import MlaSpec
from xllm_models.config import ModelConfig
from xllm_models.forward_input import ForwardInput
from xllm_models.layers.attention_cut import AttentionCut
from xllm_models.layers.decoder import DecoderLayer
from xllm_models.layers.embedding import LogitsHead, VocabEmbedding
from xllm_models.layers.linear import ParallelLinear
from xllm_models.layers.lora import LoraSlots
from xllm_models.layers.moe import StepTokens
from xllm_models.layers.norm import RMSNorm
from xllm_models.layers.rotary import RotaryTable
from xllm_models.layers.sharding import Shard
from xllm_models.placement import Placement


class LlamaForCausalLM(nn.Module):
    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(
        self,
        config: ModelConfig,
        *,
        ops: ModuleType,
        dtype: torch.dtype,  # parameters and activations
        device: torch.device,
        parallel: ParallelState,
        storage_dtype: torch.dtype | None = None,  # KV cache, and what weights are rounded to; None: `dtype`
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.storage_dtype = storage_dtype or dtype
        self.shard = Shard.of(config, parallel.tp)
        self.step = StepTokens()
        self.lora: LoraSlots | None = None  # see attach_lora
        group = parallel.tp
        self.embedding = VocabEmbedding(config.vocab_size, config.hidden_size, group, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.layer_class(config, i, self.shard, parallel, self.step, ops=ops, dtype=dtype, device=device)
            for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm, ops=ops, dtype=dtype, device=device)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.head: LogitsHead | None = None
        if config.pooling is None or config.pooling.head == "yes_no":
            self.head = LogitsHead(config.vocab_size, config.hidden_size, group, tied, ops=ops, dtype=dtype,
                                   device=device)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotaries = [RotaryTable(rope, config.rotary_head_dim, device, config.max_context_length) for rope in ropes]
        self.layer_rotaries = [self.rotaries[-1 if window else 0] for window in self.sliding_windows]

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """[num_layers]; 0: the layer sees everything."""
        return tuple(layer.attention.spec.sliding_window for layer in self.layers)  # type: ignore[union-attr, misc]

    def placements(self) -> dict[str, Placement]:
        """{checkpoint name: where it goes}, by the names Hugging Face gives."""
        found = self.embedding.placements("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            found |= layer.placements(f"model.layers.{i}.")  # type: ignore[operator]
        found |= self.norm.placements("model.norm")
        return found if self.head is None else found | self.head.placements("lm_head")

    def finalize_weights(self) -> None:
        """Once, after loading: round to the storage dtype if it is narrower, and pack matrices one at a time."""
        if self.storage_dtype != self.dtype:
            for parameter in self.parameters():
                if not getattr(parameter, "exact", False):
                    parameter.data.copy_(parameter.data.to(self.storage_dtype))
        for module in self._linears():
            module.finalize()

    def allocate_weights(self) -> None:
        """Plain, uninitialised matrices again where `finalize_weights` dropped them; load and finalize after it."""
        for module in self._linears():
            module.allocate()

    def _linears(self) -> list[ParallelLinear]:
        return [module for module in self.modules() if isinstance(module, ParallelLinear)]

    @property
    def rotary_switch(self) -> int:
        """Not 0: positions are 2p, and 2p + 1 for sequences of more tokens than this (see layers.rotary)."""
        return max(rotary.switch for rotary in self.rotaries)

    @property
    def attention_needs(self) -> frozenset[str]:
        """What of PagedBackend.features the layers use."""
        return frozenset(need for layer in self.layers for need in layer.attention.spec.needs)  # type: ignore[union-attr]

    def attention_spec(self, block_size: int) -> AttentionSpec | MlaSpec:
        return AttentionSpec(self.config.num_layers, self.shard.num_heads, self.shard.num_kv_heads,
                             self.config.head_dim, block_size, self.storage_dtype, self.device)

    def bind_attention(self, backend: PagedBackend) -> None:
        for layer in self.layers:
            layer.attention.backend = backend  # type: ignore[union-attr]

    def cut_attention(self, cut: AttentionCut | None) -> None:
        """Every layer calls `cut` instead of its own attention from now on; None: its own again."""
        for layer in self.layers:
            layer.attention.cut = cut  # type: ignore[union-attr]

    def reserve_positions(self, max_positions: int) -> None:
        """Build the rotary tables once for all; without it they grow when a longer sequence comes."""
        for rotary in self.rotaries:
            rotary.limit(max_positions)

    def forward(self, input: ForwardInput) -> torch.Tensor:
        """-> [T, hidden], after the final norm."""
        return self._run(self.layers, input)

    def _run(
        self, layers: Iterable[Callable[..., tuple[torch.Tensor, torch.Tensor]]], input: ForwardInput
    ) -> torch.Tensor:
        self.step.counts = input.dp_tokens
        if self.lora is not None:
            self.lora.begin(input.lora_slots)
        for rotary in self.rotaries:
            rotary.reserve(input.attention.max_seq_len)
        hidden, residual = self.embed(input.token_ids), None
        for layer, rotary in zip(layers, self.layer_rotaries):
            hidden, residual = layer(hidden, residual, input.positions, rotary.cos_sin)
        return self.norm(hidden, residual)[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden]"""
        return self.embedding(token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> [S, vocab] float32."""
        assert self.head is not None, "a network whose output is pooled has no logits"
        return self.head(hidden)

    def compile_decode(self) -> Callable[[ForwardInput], torch.Tensor]:
        """`forward` with the layers compiled: one trace for all depths, and one for the first (no residual)."""
        step = torch.compile(self.layer_class.forward, fullgraph=True)

        def layer_of(layer: DecoderLayer) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
            return lambda *args: step(layer, *args)

        layers = [layer_of(layer) for layer in self.layers]  # type: ignore[arg-type]
        return lambda input: self._run(layers, input)
