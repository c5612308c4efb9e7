"""A .gguf file as a Hugging Face directory: config, generation config, tokenizer and one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from xllm_models.weights.gguf_config import hf_config
from xllm_models.weights.gguf_source import GgufSource
from xllm_models.weights.gguf_tokenizer import write_tokenizer
from xllm_models.weights.loader import Progress


def export_hf_model(
    path: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> None:
    """Write `out_dir`, weights dequantized to `dtype`. The whole model is in memory once. Raises GgufError.

    `progress` hears of tensors, not of bytes.
    """
    source, out_dir = GgufSource(path), Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    config, generation = hf_config(source.file)
    _write_json(out_dir / "config.json", config | {"torch_dtype": str(dtype).removeprefix("torch.")})
    _write_json(out_dir / "generation_config.json", generation)
    write_tokenizer(source.file, out_dir)
    wanted = [name for name in source.tensors if name.startswith(("model.", "lm_head."))]
    regions = {name: tuple(slice(0, size) for size in source.tensors[name].shape) for name in wanted}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in source.stream(regions):
        state[name] = tensor.to(dtype).contiguous()
        if progress is not None:
            progress(len(state), len(wanted))
    save_file(state, out_dir / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
