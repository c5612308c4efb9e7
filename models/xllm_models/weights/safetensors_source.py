"""Weights from a directory of safetensors: one file, shards with an index, or several files without one.

Pickle checkpoints are refused: reading one executes code that its author chose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from xllm_models.weights.source import Region, TensorInfo, WeightError, WeightSource, read_region

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = ("F32", "BF16", "F16", "U8")
_LENGTH_BYTES = 8  # the header's length, little endian, opens the file


class SafetensorsSource(WeightSource):
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        shards = _shard_files(self.path)
        self._offsets: dict[str, int] = {}  # tensor -> its first byte, so that a shard is read front to back
        tensors: dict[str, TensorInfo] = {}
        for file in shards:
            for entry in _read_header(file):
                if entry.name in tensors:
                    raise WeightError(
                        f"{entry.name} is both in {tensors[entry.name].file.name} and in {file.name} of "
                        f"{self.path}. Remove the files that belong to another checkpoint."
                    )
                tensors[entry.name] = TensorInfo(entry.shape, entry.dtype, file)
                self._offsets[entry.name] = entry.begin
        self.tensors = tensors

    def check_types(self, names: Iterable[str]) -> None:
        for name in names:
            info = self.tensors[name]
            if info.dtype not in _DTYPES:
                raise WeightError(
                    f"{name} in {info.file} has dtype {info.dtype}; supported: {', '.join(_DTYPES[:3])}. "
                    "Use an unquantized checkpoint of this model."
                )

    def stream(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, torch.Tensor]]:
        self.check_types(regions)
        by_file: dict[Path, list[str]] = {}
        for name in regions:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file in sorted(by_file):
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in sorted(by_file[file], key=self._offsets.__getitem__):
                    yield name, self._read(shard, name, regions[name])

    def _read(self, shard: Any, name: str, region: Region) -> torch.Tensor:
        shape = self.tensors[name].shape
        whole = all(part == slice(0, size) for part, size in zip(region, shape, strict=True))
        if whole:
            return shard.get_tensor(name)
        rows = shard.get_slice(name)
        return read_region(lambda part: rows[part], region)


def _shard_files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    # Mistral repositories hold the same weights twice, the second time under other names.
    files = [f for f in files if not f.name.startswith("consolidated")] or files
    if files:
        return files
    pickles = sorted(f.name for f in directory.glob("*") if f.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise WeightError(
            f"{directory} holds only pickle checkpoints ({pickles[0]}), and loading a pickle can execute any "
            "code its author put there. Convert it to safetensors: where you trust it, run transformers' "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_DIR), then give NEW_DIR."
        )
    raise WeightError(f"{directory} holds no *.safetensors files. Download the model's weights into it.")


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} is damaged ({error!r}). Download it again.") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightError(
            f"{index} points outside its directory ({outside[0]!r}). Do not trust this checkpoint."
        )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WeightError(
            f"{index.parent} lacks {_some(missing)}, which {INDEX_NAME} lists. Finish the download."
        )
    return [index.parent / name for name in names]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int


def _read_header(file: Path) -> list[_Entry]:
    """The file's tensors. Raises if the file is shorter than its header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        if prefix == b"version ":
            raise WeightError(f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` beside it.")
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
            raise _truncated(file, size, _LENGTH_BYTES + header_bytes, "its header")
        text = stream.read(header_bytes)
    try:
        header = json.loads(text)
        entries = [
            _Entry(name, tuple(entry["shape"]), entry["dtype"], entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        data_bytes = max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightError(
            f"{file} is not a safetensors file: its header is damaged. Download it again."
        ) from error
    if _LENGTH_BYTES + header_bytes + data_bytes > size:
        last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
        raise _truncated(file, size, _LENGTH_BYTES + header_bytes + data_bytes, f"its last tensor {last}")
    return entries


def _truncated(file: Path, size: int, expected: int, part: str) -> WeightError:
    problem = f"it has {size:,} bytes, and {part} ends at byte {expected:,}"
    return WeightError(f"{file} is truncated: {problem}. Download it again.")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"
