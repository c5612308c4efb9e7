"""Rotary position embedding as a checkpoint states it: `RopeConfig`, and how it is read from a configuration.

Two spellings exist: `rope_theta` beside `rope_scaling`, and `rope_parameters` holding both. Torch-free; the
tables of cosines are made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xllm_models.config_keys import ConfigKeys

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields a type does not use keep their defaults."""

    theta: float = 10000.0
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # dynamic: the model's max_position_embeddings
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived, see cos_sin_scale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: correction range rounded to whole dimensions
    partial_rotary_factor: float = 1.0

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin; 1 but for yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


def read_rope(keys: ConfigKeys, max_positions: int) -> RopeConfig:
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"  # transformers' order
    scaling = keys.get(name) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        problem = "must be one flat object: rotary settings that differ by layer are not supported."
        raise keys.error(name, problem)
    # Of the two spellings, values inside the object win over the same names beside it, as in transformers.
    outside = {k: keys.get(k) for k in ("rope_theta", "partial_rotary_factor") if keys.get(k) is not None}
    rope = ConfigKeys({**outside, **scaling}, f'{keys.source}, "{name}"')
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_TYPES:
        problem = f'has rope_type "{kind}", which is not supported. Known: {", ".join(ROPE_TYPES)}.'
        raise keys.error(name, problem)
    original = max_positions
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        holder = keys if keys.get(key) else rope  # beside the object wins here, as in transformers
        original = holder.count(key, max_positions)
    return RopeConfig(
        theta=rope.positive_number("rope_theta", 10000.0),
        type=kind,
        factor=_rope_factor(rope, kind, max_positions / original),
        original_max_position_embeddings=original,
        low_freq_factor=rope.required_number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=rope.required_number("high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        partial_rotary_factor=rope.positive_number("partial_rotary_factor", 1.0),
    )


def _rope_factor(rope: ConfigKeys, kind: str, length_ratio: float) -> float:
    if kind == "default":
        return 1.0
    if kind == "yarn" and rope.get("factor") is None:
        return length_ratio
    factor = rope.required_number("factor")
    if factor < 1:
        raise rope.error("factor", f"must be at least 1, not {factor:g}.")
    return factor
