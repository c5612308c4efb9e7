"""A checkpoint that no file holds: small random values in the shapes a model asks for, for trials of speed and size.

A tensor's values depend on the seed, its name and its shape, not on which part of it a rank reads; so ranks together
hold what one device would. They are small, so that nothing overflows in half precision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from xllm_models.placement import Placement
from xllm_models.weights.source import Region, TensorInfo, WeightSource, read_region

_POOL = 1_048_573  # values that tensors are cut from; prime, so that rows of common widths do not repeat
_RANGE = 0.02
_SCALE_BYTE = 120  # of block scales as exponents: 2 ** (120 - 127)


class DummySource(WeightSource):
    def __init__(self, placements: Mapping[str, Placement], seed: int = 0) -> None:
        """What `placements` cannot do without; optional tensors are absent."""
        self.path = Path("dummy weights")
        self._seed = seed
        self.tensors = {
            name: TensorInfo(tuple(p.shape), _dtype(name, p), self.path)
            for name, p in placements.items() if not p.optional
        }
        widest = max((_rows(info.shape)[1] for info in self.tensors.values()), default=1)
        pool = torch.rand(_POOL, generator=torch.Generator().manual_seed(seed)).mul_(2 * _RANGE).sub_(_RANGE)
        self._pool = pool.repeat(2 + widest // _POOL)  # a row may begin anywhere in the first

    def stream(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, region in regions.items():
            values = read_region(lambda part, name=name: self._read(name, part), region)  # type: ignore[misc]
            yield name, _as_bytes(name, values) if self.tensors[name].dtype == "U8" else values

    def _read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """float32: each row of the last dimension is a stretch of the pool."""
        shape = self.tensors[name].shape
        if not shape:
            return self._pool[:1].reshape(())
        *leading, columns = region
        width = columns.stop - columns.start
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        begin = int.from_bytes(digest, "little") % _POOL
        strides = [math.prod(shape[i + 1 : -1]) for i in range(len(leading))]
        grids = [torch.arange(part.start, part.stop) * stride for part, stride in zip(leading, strides)]
        rows = torch.zeros((), dtype=torch.int64)
        for grid in grids:
            rows = rows[..., None] + grid
        starts = (begin + rows * shape[-1] + columns.start) % _POOL
        windows = self._pool.as_strided((_POOL, width), (1, 1))
        return windows[starts.flatten()].view(*starts.shape, width)


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, width of one)"""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _dtype(name: str, placement: Placement) -> str:
    quantized = placement.store is not None and name.endswith(("_blocks", "_scales"))
    return "U8" if quantized else "F32"


def _as_bytes(name: str, values: torch.Tensor) -> torch.Tensor:
    """Packed values of any bits, and scales that keep them small."""
    if name.endswith("_scales"):
        return torch.full(values.shape, _SCALE_BYTE, dtype=torch.uint8)
    return ((values / _RANGE + 1) * 127).to(torch.uint8)
