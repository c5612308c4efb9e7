"""A checkpoint under other names: that of a bare network, or one whose names carry those of a head around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from xllm_models.weights.source import Region, WeightSource


class RenamedSource(WeightSource):
    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        """`names`: theirs -> ours; a tensor that is not among them is left out."""
        self._source, self._theirs = source, {ours: theirs for theirs, ours in names.items()}
        self._ours = dict(names)
        self.path = source.path
        self.tensors = {ours: source.tensors[theirs] for theirs, ours in names.items()}

    def check_types(self, names: Iterable[str]) -> None:
        self._source.check_types(self._theirs[ours] for ours in names)

    def stream(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, torch.Tensor]]:
        for theirs, tensor in self._source.stream({self._theirs[ours]: region for ours, region in regions.items()}):
            yield self._ours[theirs], tensor


def with_prefix(source: WeightSource, theirs: str, ours: str) -> WeightSource:
    """Names that begin with `theirs` begin with `ours` instead; others stay."""
    if theirs == ours:
        return source
    return RenamedSource(source, {name: ours + name.removeprefix(theirs) if name.startswith(theirs) else name
                                  for name in source.tensors})
