"""DeepSeek-V2, DeepSeek-V3 (Kimi K2 is one of them), and what shares their network: latent attention and experts.

`ModelConfig.mla` says how attention is built and `ModelConfig.moe` how layers choose experts, so the names differ in
their configuration alone. Layers past num_hidden_layers, which predict further tokens, are not loaded.
"""

from __future__ import annotations

from typing import Any

from xllm_models.attention.mla_base import MlaSpec
from xllm_models.config import ModelConfig, ModelConfigError
from xllm_models.llama import LlamaForCausalLM
from xllm_models.mla_config import MLA_MODEL_TYPES


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Softmax routing, greedy or limited to groups."""

    def __init__(self, config: ModelConfig, **kind: Any) -> None:
        if config.mla is None:
            raise ModelConfigError(f'{config.architecture} has latent attention, and model_type "{config.model_type}" '
                                   f"has none. Set model_type to one of {', '.join(MLA_MODEL_TYPES)}.")
        super().__init__(config, **kind)

    def attention_spec(self, block_size: int) -> MlaSpec:
        mla = self.config.mla
        assert mla is not None
        return MlaSpec(self.config.num_layers, self.shard.num_heads, mla.kv_lora_rank, mla.qk_rope_head_dim,
                       mla.qk_nope_head_dim, mla.v_head_dim, block_size, self.storage_dtype, self.device)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Sigmoid routing whose choice a learned bias corrects."""


class Glm4MoeLiteForCausalLM(DeepseekV2ForCausalLM):
    """GLM-4.7-Flash: as DeepSeek-V3; its configuration lists the layers with experts."""


class YoutuForCausalLM(DeepseekV2ForCausalLM):
    """Youtu-LLM: DeepSeek-V3's attention, no experts."""
