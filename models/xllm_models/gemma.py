"""Gemma 2 and 3: scaled embeddings, norms before and behind each part with factors 1 + weight, soft-capped logits.

The configuration carries the rest: which layers see a window, both rotary bases of Gemma 3, soft-capped scores.
"""

from __future__ import annotations

import torch

from xllm_models.layers.decoder import SandwichLayer
from xllm_models.llama import LlamaForCausalLM
from xllm_models.placement import Placement


class GemmaLayer(SandwichLayer):
    norm_names = {
        "input_norm": "input_layernorm", "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_output_norm": "post_feedforward_layernorm",
    }


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2."""

    layer_class = GemmaLayer

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Scaled by the root of the width, rounded as in the checkpoint's dtype."""
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.storage_dtype).item()
        return self.embedding(token_ids) * scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().compute_logits(hidden), self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, text only."""


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a Gemma 3 that sees; its vision tower is not loaded."""

    def placements(self) -> dict[str, Placement]:
        return {f"language_model.{name}": placement for name, placement in super().placements().items()}
