"""One opened .gguf file: its metadata by key, its tensors by llama.cpp's names.

Opening checks that the file is whole; a damaged one is a `GgufError` naming it. Floats come back as the
shortest decimal that reads as the stored 32-bit value, so an epsilon written as 1e-5 is 1e-05 again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor

from xllm_models.config_keys import ModelConfigError
from xllm_models.weights.source import WeightError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_REQUIRED: Any = object()


class GgufError(WeightError, ModelConfigError):
    """The .gguf file is damaged or holds what is not supported."""


class GgufFile:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reader = _open(self.path)
        self.architecture: str = self.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise GgufError(
                f'{self.path} is a "{self.architecture}" model; read are: {", ".join(ARCHITECTURES)}. '
                "Use the model's Hugging Face directory."
            )
        if (parts := self.get("split.count", 1)) > 1:
            raise GgufError(
                f"{self.path} is one of {parts} parts. Join them with llama.cpp's `llama-gguf-split --merge`."
            )
        self.tensors: dict[str, ReaderTensor] = {t.name: t for t in self.reader.tensors}

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        field = self.reader.fields.get(key)
        if field is None:
            if default is _REQUIRED:
                raise GgufError(f'{self.path}: metadata key "{key}" is missing. Convert the model again.')
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def model(self, key: str, default: Any = _REQUIRED) -> Any:
        """A key of the architecture's own, such as "block_count"."""
        return self.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.model(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise GgufError(
                f'{self.path}: "{self.architecture}.{key}" must be one number for all layers, not {value!r}.'
            )
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token: "bos", "eos", "eot", "unknown", "padding"."""
        token: int | None = self.get(f"tokenizer.ggml.{name}_token_id", None)
        return token

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """As Hugging Face orders it; ggml puts the fastest dimension first."""
        if name not in self.tensors:
            raise GgufError(f"{self.path} lacks the tensor {name}. Convert the model again.")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise GgufError(f"{path} does not exist. Check the path.")
    try:
        return GGUFReader(path)
    except (
        ValueError,
        IndexError,
        KeyError,
        UnicodeDecodeError,
        OverflowError,
        json.JSONDecodeError,
    ) as error:
        # The reader slices a memory map: past the file's end it gets too few bytes to reshape.
        raise GgufError(f"{path} is truncated or no .gguf file ({error}). Download it again.") from error
