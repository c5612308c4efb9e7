"""Random LoRA adapters as PEFT saves them, and what a model answers whose weights they were added to."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest, LoadLora
from xllm_npu.state.sampling_params import SamplingParams

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PREFIX = "base_model.model."


def make_adapter(directory: Path, model: Path, targets: tuple[str, ...] = ALL, *, rank: int = 4, alpha: float = 8,
                 seed: int = 0, std: float = 0.3, **config: Any) -> Path:
    """Every linear module whose last name is one of `targets`; `config` overrides adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and weight.ndim == 2:
            rows, columns = weight.shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * std
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * std
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    body = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
            "target_modules": list(targets), "modules_to_save": None, "use_rslora": False, "use_dora": False, **config}
    (directory / "adapter_config.json").write_text(json.dumps(body))
    return directory


def merged_answers(model: Path, adapter: Path | None, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy, by transformers, from W + scale * B A in float32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
        tensors = load_file(adapter / "adapter_model.safetensors")
        with torch.no_grad():
            for name, a in tensors.items():
                if name.endswith(".lora_A.weight"):
                    b = tensors[name.replace(".lora_A.", ".lora_B.")]
                    module = network.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_A.weight"))
                    module.weight += config["lora_alpha"] / root * (b.double() @ a.double()).float()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                   max_new_tokens=max_tokens)
            answers.append(out[0, len(prompt):].tolist())
    return answers


def lora_loop(model: Path, adapters: list[Path], **settings: Any) -> EngineLoop:
    """With adapters 1, 2, ... loaded."""
    options = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1, "enable_lora": True,
               "max_loras": max(1, len(adapters)), **settings}
    loop = EngineLoop.create(settings_from_kwargs(model=str(model), **options))
    for lora_id, path in enumerate(adapters, 1):
        assert loop.command(LoadLora(lora_id, str(path))).error == ""
    return loop


def run_loop(loop: EngineLoop, requests: list[tuple[list[int], int]], max_tokens: int, first_id: int = 0,
             ) -> list[list[int]]:
    """Tokens for each (prompt, adapter), all submitted at once."""
    for i, (prompt, lora_id) in enumerate(requests, first_id):
        loop.submit(AddRequest(
            request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(), lora_id=lora_id,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens), arrival_time=time.time()))
    answers: list[list[int]] = [[] for _ in requests]
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None:
            for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
                answers[key // SEQUENCES_PER_REQUEST - first_id].append(token)
            assert not [f for f in outputs.finished if f.message], [f.message for f in outputs.finished]
        loop.scheduler.check_integrity()
    assert loop.scheduler.running.blocks.pool.num_used == 0
    return answers
