"""The multi-head latent attention (MLA) part of a model's configuration: the sizes of its low-rank projections.

Read from config.json by `ModelConfig`; knows no weights and no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from xllm_models.config_keys import ConfigKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int  # the latent that stands for a token's keys and values in all heads
    qk_nope_head_dim: int  # of a head's query and key: the part without position
    qk_rope_head_dim: int  # and the rotated part; the key's is one for all heads
    v_head_dim: int
    rope_interleave: bool = True  # rotated pairs are neighbours (2i, 2i+1) in the checkpoint, not (i, i + half)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values a token takes in one layer's cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


MLA_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu")


def read_mla(keys: ConfigKeys, model_type: str) -> MlaConfig | None:
    """None where the model type has no latent attention. Raises ModelConfigError."""
    if model_type not in MLA_MODEL_TYPES:
        return None
    mla = MlaConfig(
        q_lora_rank=None if keys.get("q_lora_rank") is None else keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
        rope_interleave=model_type == "deepseek_v2" or keys.flag("rope_interleave", True),
    )
    if mla.qk_rope_head_dim % 2:
        raise keys.error("qk_rope_head_dim", f"must be even for rotary embeddings, not {mla.qk_rope_head_dim}.")
    return mla
