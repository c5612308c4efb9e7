"""Rotary position embedding: the table of cosines and sines by position, for every scaling in use.

Numbers equal transformers' (angles in float32, one factor on cos and sin). The table depends on the position alone,
never on the batch, so cached keys stay valid whoever shares them. That decides the dynamic (NTK) type, whose base
grows with the sequence: position p is rotated with the base for a sequence of p + 1 tokens. transformers does
the same for generated tokens, and rotates all of a prompt longer than `max_position_embeddings` with the base for
its full length; there the two differ, and equal prefixes of different prompts would differ in transformers.

longrope has two sets of frequencies: transformers rotates a whole sequence with the first, and anew with the second as
soon as it is longer than the original length. Where sequences may become so long the table has two rows a position,
2p for the first set and 2p + 1 for the second, and `switch` says that whoever makes positions must choose, and compute
a sequence anew that crosses it.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from xllm_models.config import RopeConfig
from xllm_models.placement import Placement

_GROW = 4096  # positions by which the table grows at least


class RotaryTable:
    """cos_sin [P, R] float32: R/2 cosines, then R/2 sines; R is the number of rotated dimensions of a head."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, longest: int = 0) -> None:
        """`longest`: positions a sequence may have; `limit` may lower it before the first use."""
        self.rope, self.rotary_dim, self.longest = rope, int(head_dim * rope.partial_rotary_factor), longest
        self.cos_sin = torch.empty(0, self.rotary_dim, dtype=torch.float32, device=device)

    @property
    def switch(self) -> int:
        """Tokens a sequence may have with the first of two sets of frequencies; 0: there is one set for all."""
        original = self.rope.original_max_position_embeddings
        return original if self.rope.type == "longrope" and self.longest > original else 0

    def limit(self, longest: int) -> None:
        """No sequence will have more positions than these, which become valid all at once."""
        assert self.cos_sin.shape[0] == 0 or longest <= self.longest, "cached keys would be rotated otherwise"
        self.longest = longest if self.cos_sin.shape[0] == 0 else self.longest
        self.reserve(longest)

    def reserve(self, num_positions: int) -> None:
        """Make positions 0..num_positions-1 valid. Growing moves the table: graphs need it reserved before capture."""
        there = self.cos_sin.shape[0] // (2 if self.switch else 1)
        if num_positions <= there:
            return
        count = max(num_positions, there + _GROW)
        table = cos_sin_table(self.rope, self.rotary_dim, count, self.switch > 0).to(self.cos_sin.device)
        table[: self.cos_sin.shape[0]] = self.cos_sin  # bit for bit what cached keys were rotated with
        self.cos_sin = table


def halves_of_pairs(placement: Placement, head_dim: int, rotary_dim: int) -> Placement:
    """The same rows of heads, but of each head's rotated dimensions 0, 2, 4... come first, then 1, 3, 5..."""
    return reordered(placement, torch.cat((pairs_to_halves(rotary_dim), torch.arange(rotary_dim, head_dim))))


def pairs_to_halves(rotary_dim: int) -> torch.Tensor:
    """0, 2, 4... 1, 3, 5..."""
    return torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))


def reordered(placement: Placement, order: torch.Tensor) -> Placement:
    """The same rows of heads, those of each head in this order, [head_dim] int64."""

    def store(part: torch.Tensor) -> None:
        heads = part.view(-1, order.numel(), *part.shape[1:])[:, order]
        placement.param.data[placement.dest].copy_(heads.reshape(part.shape))

    return dataclasses.replace(placement, store=store, order=order)


def cos_sin_table(rope: RopeConfig, rotary_dim: int, num_positions: int, both: bool = False) -> torch.Tensor:
    """[num_positions, rotary_dim] float32 on the CPU; [2 * num_positions, rotary_dim] with `both` sets of longrope."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    if rope.type == "dynamic":
        limit = rope.original_max_position_embeddings
        angles = positions[:limit, None] * _inverse_frequencies(rope.theta, rotary_dim)
        beyond = positions[limit:, None]
        angles = torch.cat((angles, beyond * _dynamic_frequencies(rope, rotary_dim, beyond + 1)))
    elif rope.type == "longrope":
        sets = [rope.short_factor, rope.long_factor] if both else [rope.short_factor]
        powers = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angles = (positions[:, None, None] * (1.0 / (torch.tensor(sets) * powers))).flatten(0, 1)
    else:
        angles = positions[:, None] * _FREQUENCIES[rope.type](rope, rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.cos_sin_scale


def _inverse_frequencies(theta: float, dim: int) -> torch.Tensor:
    """[dim/2] float32"""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _dynamic_frequencies(rope: RopeConfig, dim: int, seq_lens: torch.Tensor) -> torch.Tensor:
    """seq_lens [P, 1] float32 -> [P, dim/2]. The base is float32, as in transformers, where the length is a tensor."""
    stretch = rope.factor * seq_lens / rope.original_max_position_embeddings - (rope.factor - 1)
    base = rope.theta * stretch ** (dim / (dim - 2))
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(rope: RopeConfig, dim: int) -> torch.Tensor:
    return _inverse_frequencies(rope.theta, dim)


def _linear(rope: RopeConfig, dim: int) -> torch.Tensor:
    return _inverse_frequencies(rope.theta, dim) / rope.factor


def _llama3(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    frequencies = _inverse_frequencies(rope.theta, dim)
    length, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / rope.factor, frequencies)
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Dimensions that turn often within the trained length extrapolate, slow ones interpolate, a ramp between."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low, high = (_yarn_dimension(rope, dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_dimension(rope: RopeConfig, dim: int, turns: float) -> float:
    """The (fractional) pair of dimensions that turns this often within the trained length."""
    length = rope.original_max_position_embeddings
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
