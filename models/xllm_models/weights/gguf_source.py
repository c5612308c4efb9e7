"""Weights from a .gguf file, under Hugging Face's names and layout, dequantized one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor, dequantize

from xllm_models.weights.gguf_file import GgufError, GgufFile
from xllm_models.weights.source import Region, TensorInfo, WeightSource, read_region

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTEGERS = (
    GGMLQuantizationType.I8,
    GGMLQuantizationType.I16,
    GGMLQuantizationType.I32,
    GGMLQuantizationType.I64,
)


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; names without one (rope_freqs.weight) stay as they are."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


class GgufSource(WeightSource):
    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        self.path = self.file.path
        self._names = {hf_name(name): name for name in self.file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(self.file.tensor_shape(own), self.file.tensors[own].tensor_type.name, self.path)
            for name, own in self._names.items()
        }
        self._interleaved = _interleaved_heads(self.file)

    def stream(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, torch.Tensor]]:
        offsets = {name: self.file.tensors[self._names[name]].data_offset for name in regions}
        for name in sorted(regions, key=offsets.__getitem__):
            yield name, self._read(name, regions[name])

    def _read(self, name: str, region: Region) -> torch.Tensor:
        return read_region(lambda part: self._read_part(name, part), region)

    def _read_part(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        own = self._names[name]
        tensor = self.file.tensors[own]
        if tensor.tensor_type in _INTEGERS:
            raise GgufError(
                f"{own} in {self.path} has type {tensor.tensor_type.name}, which is not supported."
            )
        part = own.split(".")[2] if own.startswith("blk.") else ""
        if part in self._interleaved:
            return _split_halves(_to_torch(tensor, tensor.data, own, self.path), self._interleaved[part])[
                region
            ]
        rows, *columns = region  # rows are whole in the file; quantized columns are not
        return _to_torch(tensor, tensor.data[rows], own, self.path)[(slice(None), *columns)]


def _interleaved_heads(file: GgufFile) -> dict[str, int]:
    """llama.cpp's "llama" pairs dimensions (0, 1), (2, 3)...; Hugging Face (0, d/2), (1, d/2 + 1)..."""
    if file.architecture != "llama":
        return {}
    heads = file.count("attention.head_count")
    return {"attn_q": heads, "attn_k": file.count("attention.head_count_kv", heads)}


def _split_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, ...] with each head's rows interleaved -> one half of them after the other."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _to_torch(tensor: ReaderTensor, data: np.ndarray, name: str, path: Path) -> torch.Tensor:
    """A copy out of the memory map; 16-bit types stay, quantized ones become float32."""
    kind = tensor.tensor_type
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16)
    if kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        return torch.from_numpy(np.array(data))
    try:
        return torch.from_numpy(np.array(dequantize(data, kind), np.float32))
    except NotImplementedError:
        raise GgufError(
            f"{name} in {path} has type {kind.name}, which the gguf package cannot dequantize. "
            "Use another quantization of this model, such as Q8_0 or Q4_K_M."
        ) from None
