"""From an architecture's name to its class, imported at first use; and how a model is built.

Adding an architecture is one module with a class like `LlamaForCausalLM` and one line here (or a call of
`register_model` from outside).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from xllm_platform.parallel import ParallelState

from xllm_models import transformers_config
from xllm_models.backends import get_ops
from xllm_models.config import ModelConfig
from xllm_models.config_keys import architecture_of, read_json
from xllm_models.llama import LlamaForCausalLM

_MODELS = {
    "DeepseekV2ForCausalLM": "xllm_models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "xllm_models.deepseek:DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM": "xllm_models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "xllm_models.gemma:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "xllm_models.gemma:Gemma3ForConditionalGeneration",
    "Glm4ForCausalLM": "xllm_models.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "xllm_models.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "xllm_models.deepseek:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "xllm_models.glm4:GlmForCausalLM",
    "GptOssForCausalLM": "xllm_models.gpt_oss:GptOssForCausalLM",
    "LlamaForCausalLM": "xllm_models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "xllm_models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "xllm_models.mixtral:MixtralForCausalLM",
    "Phi3ForCausalLM": "xllm_models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "xllm_models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "xllm_models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "xllm_models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "xllm_models.qwen3_moe:Qwen3MoeForCausalLM",
    "YoutuForCausalLM": "xllm_models.deepseek:YoutuForCausalLM",
}


class UnsupportedModelError(ValueError):
    """We have no such network; the message says what we have."""


def register_model(name: str, target: str) -> None:
    """`target` is "module:Class"; the class takes what `build_model` passes and has LlamaForCausalLM's interface."""
    _MODELS[name] = target


def supported_models() -> list[str]:
    return sorted(_MODELS)


def get_model_class(name: str) -> type[LlamaForCausalLM]:
    if name not in _MODELS:
        raise UnsupportedModelError(f"Architecture {name} is not supported. Those are: {', '.join(sorted(_MODELS))}.")
    module, _, attribute = _MODELS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def read_model_config(path: Path, model_impl: str = "auto") -> ModelConfig:
    """The configuration, read for the implementation that will run: auto is native where there is a native class.

    `path` is a model directory or a .gguf file. Raises ModelConfigError.
    """
    if path.suffix == ".gguf" and model_impl != "transformers":
        return ModelConfig.from_gguf(path)
    if model_impl == "native":
        return ModelConfig.from_dir(path)
    if path.suffix == ".gguf":
        return transformers_config.read_config(path)
    source = path / "config.json"
    raw = read_json(source)
    if model_impl == "auto" and architecture_of(raw, str(source)) in _MODELS:
        return ModelConfig.from_dir(path)
    transformers_config.refuse_unknown(raw, str(source), supported_models())
    return transformers_config.read_config(path)


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: str = "torch",
    parallel: ParallelState | None = None,
) -> LlamaForCausalLM:
    """A model with uninitialised parameters, ready for `load_weights`.

    float16 on the CPU: weights are rounded to float16 and the KV cache is float16, arithmetic is float32, because
    CPUs multiply float16 matrices hundreds of times slower.
    """
    device, ops = torch.device(device), get_ops(kernels)
    if config.implementation == "transformers":
        model_class = _transformers_class()
    else:
        model_class = get_model_class(config.architecture)
    if config.implementation == "native" and config.hidden_act not in ops.ACTIVATIONS:
        known = ", ".join(sorted(ops.ACTIVATIONS))
        raise UnsupportedModelError(f'hidden_act "{config.hidden_act}" is not supported. Supported: {known}.')
    computed = torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype
    model = model_class(config, ops=ops, dtype=computed, device=device, parallel=parallel or ParallelState.single(),
                        storage_dtype=dtype)
    return model.eval()


def _transformers_class() -> type[LlamaForCausalLM]:
    """Imported here, since it takes seconds; it has the interface, not the parts."""
    from xllm_models.transformers_model import TransformersModel

    return TransformersModel  # type: ignore[return-value]
