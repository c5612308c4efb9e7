"""A tiny gpt-oss whose experts lie in MXFP4 on disk, as the published checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

FIELDS = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}


def random_mxfp4(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte, and scales that keep the products near one."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)


def make_mxfp4_model(directory: Path, order: tuple[str, str] = ("blocks", "scales")) -> GptOssForCausalLM:
    """A checkpoint with quantized experts, and transformers' model with the same weights in float32."""
    torch.manual_seed(0)
    config = GptOssConfig(**FIELDS, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=12)
    model = GptOssForCausalLM(config).eval()
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name, rows, columns in (("gate_up_proj", 2 * 96, 64), ("down_proj", 64, 96)):
            blocks, scales = random_mxfp4(4, rows, columns)
            weight = getattr(layer.mlp.experts, name)
            weight.data = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            torch.nn.init.normal_(getattr(layer.mlp.experts, f"{name}_bias"), std=0.3)
            prefix = f"model.layers.{i}.mlp.experts.{name}_"
            packed |= dict(zip((f"{prefix}blocks", f"{prefix}scales"), (blocks, scales)))
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    plain = {k: v for k, v in stored.items() if not k.endswith(("gate_up_proj", "down_proj"))}
    (directory / "model.safetensors").unlink()
    for kind in order:  # files are read in the order of their names
        some = {k: v for k, v in packed.items() if k.endswith(kind)}
        save_file(some, directory / f"{order.index(kind)}.safetensors", {"format": "pt"})
    save_file(plain, directory / "rest.safetensors", {"format": "pt"})
    saved = json.loads((directory / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(saved))
    return model
