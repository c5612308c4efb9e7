"""Fill a model's parameters from a weight source, shard by shard.

The model says where each checkpoint tensor goes (placement.py); this reads only this rank's part and copies
it into place, converting to the parameter's dtype. Peak host memory is the model and one shard. Everything
that can be wrong with names and shapes is found before the first byte of data is read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from xllm_models.placement import Placement
from xllm_models.weights.host_memory import HostMemoryPeak
from xllm_models.weights.source import Region, WeightError, WeightSource

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), in the parameters' dtypes

_NAMED = 5  # tensors an error message lists
_KNOWN_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # recomputed, not loaded


class LoadableModel(Protocol):
    def placements(self) -> Mapping[str, Placement]: ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    bytes: int  # put into parameters, in their dtypes
    seconds: float
    tensors: int  # read from the checkpoint
    peak_bytes: int  # of host memory above what the process had before


def load_weights(model: LoadableModel, source: WeightSource, progress: Progress | None = None) -> LoadReport:
    """Fill every placement, or have the model do it (`load_from`, which is like `fill`); then call the model's
    `finalize_weights()` if it has one. Raises WeightError.
    """
    started, memory = time.perf_counter(), HostMemoryPeak()

    def watched(done: int, total: int) -> None:
        memory.sample()
        if progress is not None:
            progress(done, total)

    load_from = getattr(model, "load_from", None)
    done, tensors = load_from(source, watched) if load_from else fill(model.placements(), source, watched)
    finalize = getattr(model, "finalize_weights", None)
    if finalize is not None:
        finalize()
    return LoadReport(done, time.perf_counter() - started, tensors, memory.rise())


def check_weights(model: LoadableModel, source: WeightSource) -> None:
    """Raise the WeightError that `load_weights` would raise of names, shapes and types; reads headers alone.

    A model that fills itself (`load_from`) checks itself too (`check_from`).
    """
    check_from = getattr(model, "check_from", None)
    if check_from is not None:
        check_from(source)
    else:
        check_placements(model.placements(), source)


def check_placements(placements: Mapping[str, Placement], source: WeightSource) -> dict[str, Region]:
    """What of each tensor this rank reads. Raises WeightError."""
    _check_names(placements, source)
    _check_shapes(placements, source)
    _check_bytes(placements, source)
    regions = {name: region_of(name, p) for name, p in placements.items() if name in source.tensors}
    source.check_types(regions)
    return regions


def num_parameters(source: WeightSource) -> int:
    """Values in the checkpoint's tensors; those of 4 bits lie two in a byte, and their scales are none."""
    counts = (
        0 if info.dtype == "U8" and name.endswith("_scales") else math.prod(info.shape) * (1 + (info.dtype == "U8"))
        for name, info in source.tensors.items() if not name.endswith(_KNOWN_BUFFERS)
    )
    return sum(counts)


def fill(
    placements: Mapping[str, Placement], source: WeightSource, progress: Progress | None = None
) -> tuple[int, int]:
    """-> (bytes put into parameters, tensors read)."""
    regions = check_placements(placements, source)
    sizes = {
        name: _num_elements(region) * placements[name].param.element_size()
        for name, region in regions.items()
    }
    done, total = 0, sum(sizes.values())
    for name, tensor in source.stream(regions):
        _copy(name, tensor, placements[name])
        del tensor  # or it would keep its shard mapped while the next one opens
        done += sizes[name]
        if progress is not None:
            progress(done, total)
    return done, len(regions)


def region_of(name: str, placement: Placement) -> Region:
    """This rank's part of the checkpoint tensor."""
    region: list[slice | tuple[slice, ...]] = [slice(0, size) for size in placement.shape]
    dim = placement.shard_dim
    if dim is not None:
        sections = placement.sections or ((placement.shape[dim], placement.shard_index, placement.shard_count),)
        parts: list[slice] = []
        begin = 0
        for size, index, count in sections:
            if size % count:
                raise WeightError(
                    f"{name} has {size} rows or columns to split, which {count} ranks do not divide. "
                    "Choose a tensor parallel size that does."
                )
            part = size // count
            first, end = begin + index * part, begin + (index + 1) * part
            if parts and parts[-1].stop == first:
                first = parts.pop().start  # neighbours are read at once
            parts.append(slice(first, end))
            begin += size
        region[dim] = tuple(parts) if len(parts) > 1 else parts[0]
    return tuple(region)


def _copy(name: str, tensor: torch.Tensor, placement: Placement) -> None:
    if placement.store is not None:
        placement.store(tensor)
        return
    target = placement.param.data[placement.dest]
    assert target.shape == tensor.shape, f"{name}: placed {tuple(tensor.shape)} in {tuple(target.shape)}"
    target.copy_(tensor)


def _num_elements(region: Region) -> int:
    parts = [part if isinstance(part, tuple) else (part,) for part in region]
    return math.prod(sum(one.stop - one.start for one in part) for part in parts)


def _check_names(placements: Mapping[str, Placement], source: WeightSource) -> None:
    unexpected = [name for name in source.tensors if name not in placements]
    missing = [name for name, p in placements.items() if name not in source.tensors and not p.optional]
    if missing:
        hint = f" It holds others this model has no place for, such as {unexpected[0]}." if unexpected else ""
        raise WeightError(
            f"{source.path} lacks {len(missing)} of the model's tensors: {_some(missing)}.{hint} "
            "Check that weights and config.json belong together and that the download is complete."
        )
    for name in unexpected:
        if not name.endswith(_KNOWN_BUFFERS):
            logger.debug("%s: ignoring %s, which the model does not use", source.path, name)


def _check_shapes(placements: Mapping[str, Placement], source: WeightSource) -> None:
    wrong = [
        f"{name} is {list(source.tensors[name].shape)}, expected {list(p.shape)}"
        for name, p in placements.items()
        if name in source.tensors and source.tensors[name].shape != tuple(p.shape)
    ]
    if wrong:
        raise WeightError(
            f"{source.path} has {len(wrong)} tensors of another shape than config.json implies: "
            f"{_some(wrong, '; ')}. "
            "Check that weights and config.json belong together."
        )


def _check_bytes(placements: Mapping[str, Placement], source: WeightSource) -> None:
    for name, placement in placements.items():
        if name in source.tensors and source.tensors[name].dtype == "U8" and placement.store is None:
            raise WeightError(
                f"{name} in {source.tensors[name].file} has dtype U8: it is quantized in a way this model's loader "
                "does not know. Use an unquantized checkpoint of this model."
            )


def _some(names: list[str], separator: str = ", ") -> str:
    rest = f"{separator}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + rest
