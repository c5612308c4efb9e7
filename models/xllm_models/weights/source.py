"""Where weights come from: a checkpoint whose tensors are listed first, then streamed one shard at a time.

Names are Hugging Face's, whatever the file calls them. A source knows the file, not the model: neither which
tensors are wanted nor where they go (see placement and loader).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# For each dimension a slice with start and stop set and step 1, or several that are read one after the other.
Region = tuple[slice | tuple[slice, ...], ...]


class WeightError(ValueError):
    """The checkpoint is damaged, incomplete, or not the model's. The message names file and tensors."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str  # as the file spells it, "BF16" or "Q4_1"
    file: Path


class WeightSource(ABC):
    """An opened checkpoint. Opening reads headers only and refuses truncated files."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def check_types(self, names: Iterable[str]) -> None:  # noqa: B027  # most sources read all that they hold
        """Raise WeightError if one of these tensors is of a type that `stream` cannot read."""

    @abstractmethod
    def stream(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each named tensor's region once, in file order, on the CPU; floating point, or uint8 as it is.

        At most one shard is open at a time; a tensor must be dropped before the next is asked for.
        """


def read_region(read: Callable[[tuple[slice, ...]], torch.Tensor], region: Region) -> torch.Tensor:
    """A region through a function that knows plain slices only."""
    for dim, part in enumerate(region):
        if isinstance(part, tuple):
            return torch.cat([read_region(read, (*region[:dim], one, *region[dim + 1:])) for one in part], dim)
    return read(region)  # type: ignore[arg-type]


def open_source(path: str | Path) -> WeightSource:
    """A directory of safetensors or a .gguf file."""
    path = Path(path)
    if path.suffix == ".gguf":
        from xllm_models.weights.gguf_source import GgufSource

        return GgufSource(path)
    from xllm_models.weights.safetensors_source import SafetensorsSource

    return SafetensorsSource(path)
