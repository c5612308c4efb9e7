"""Rotary position embedding as a checkpoint states it: `RopeConfig`, and how it is read from a configuration.

Two spellings exist: `rope_theta` beside `rope_scaling`, and `rope_parameters` holding both. Torch-free; the
tables of cosines are made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xllm_models.config_keys import ConfigKeys

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


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
    attention_factor: float | None = None  # yarn, longrope; None: derived, see cos_sin_scale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: correction range rounded to whole dimensions
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()  # longrope: wavelengths are multiplied by these, a pair of dimensions each,
    long_factor: tuple[float, ...] = ()  # and by these where sequences are longer than the original length

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin; 1 but for yarn and longrope."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "longrope":
            original = self.original_max_position_embeddings
            return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(original))
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def latent_score_scale(self) -> float:
        """Factor on the scores of latent attention, which alone reads `mscale_all_dim` this way."""
        if self.type == "default" or not self.mscale_all_dim:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def read_rope(keys: ConfigKeys, model_type: str, max_positions: int) -> RopeConfig:
    if model_type == "gemma3_text":
        return _rope(keys, _gemma3_rope(keys, "full_attention", "rope_theta", 1e6), max_positions)
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"  # transformers' order
    scaling = keys.get(name) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        problem = "must be one flat object: rotary settings that differ by layer are not supported."
        raise keys.error(name, problem)
    # Of the two spellings, values inside the object win over the same names beside it, as in transformers.
    outside = {k: keys.get(k) for k in ("rope_theta", "partial_rotary_factor") if keys.get(k) is not None}
    settings = {**outside, **scaling}
    if model_type == "phi3" and settings.get("rope_type", settings.get("type")) in ("su", "yarn"):
        settings["rope_type"] = "longrope"  # what it was called before it had a name
    return _rope(keys, ConfigKeys(settings, f'{keys.source}, "{name}"'), max_positions)


def read_local_rope(keys: ConfigKeys, model_type: str, max_positions: int) -> RopeConfig | None:
    """Of the layers with a sliding window, where they have their own."""
    if model_type != "gemma3_text":
        return None
    return _rope(keys, _gemma3_rope(keys, "sliding_attention", "rope_local_base_freq", 1e4), max_positions)


def _gemma3_rope(keys: ConfigKeys, kind: str, base: str, theta: float) -> ConfigKeys:
    """`rope_parameters` has an object for each kind of layer; the older spelling scales only the full ones."""
    settings = {"rope_theta": keys.number(base, theta)}
    parameters = keys.get("rope_parameters")
    if isinstance(parameters, Mapping) and isinstance(parameters.get(kind), Mapping):
        settings |= parameters[kind]
    scaling = keys.get("rope_scaling")
    if kind == "full_attention" and isinstance(scaling, Mapping):
        settings |= scaling
    return ConfigKeys(settings, f'{keys.source}, rotary settings of "{kind}"')


def _rope(keys: ConfigKeys, rope: ConfigKeys, max_positions: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise rope.error("rope_type", f'is "{kind}", which is not supported. Known: {known}.')
    original = max_positions
    if kind in ("llama3", "yarn", "longrope"):
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
        short_factor=_factors(rope, "short_factor") if kind == "longrope" else (),
        long_factor=_factors(rope, "long_factor") if kind == "longrope" else (),
    )


def _factors(rope: ConfigKeys, key: str) -> tuple[float, ...]:
    values = rope.get(key)
    numbers = isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values)
    if not numbers:
        raise rope.error(key, f"must be a list of numbers above 0, not {values!r}.")
    return tuple(float(v) for v in values)


def _rope_factor(rope: ConfigKeys, kind: str, length_ratio: float) -> float:
    if kind == "default":
        return 1.0
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        return length_ratio
    factor = rope.required_number("factor")
    if factor < 1:
        raise rope.error("factor", f"must be at least 1, not {factor:g}.")
    return factor
