"""From an architecture's name to its class, imported at first use; and how a model is built.

Adding an architecture is one module with a class like `LlamaForCausalLM` and one line here (or a call of
`register_model` from outside).
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from xllm_platform.parallel import ParallelState

from xllm_models import transformers_config
from xllm_models.backends import get_ops
from xllm_models.config import ModelConfig
from xllm_models.config_keys import ModelConfigError, architecture_of, read_json
from xllm_models.llama import LlamaForCausalLM
from xllm_models.pooling_config import PoolingWish, causal_name, encoder_family, overridden, read_pooling

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


def read_model_config(path: Path, model_impl: str = "auto", wish: PoolingWish | None = None) -> ModelConfig:
    """The configuration, read for the implementation that will run: auto is native where there is a native class.

    `path` is a model directory or a .gguf file; `wish` is what the user says of vectors in place of text. Raises
    ModelConfigError.
    """
    wish = wish or PoolingWish()
    if path.suffix == ".gguf":
        if wish.runner == "pooling" or wish.qwen3_reranker or wish.convert in ("embed", "classify"):
            raise ModelConfigError(f"{path}: a .gguf file is served for generation only. Give the safetensors "
                                   "checkpoint.")
    elif (pooled := _pooled_config(path, model_impl, wish)) is not None:
        return pooled
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


def _pooled_config(path: Path, model_impl: str, wish: PoolingWish) -> ModelConfig | None:
    """That of a model which gives vectors; None: it generates text."""
    source = str(path / "config.json")
    raw = overridden(read_json(path / "config.json"), wish, source)
    pooling = read_pooling(path, raw, wish)
    if pooling is None:
        if wish.pooler or wish.overrides:
            raise ModelConfigError(f"{source}: pooler_config and hf_overrides are for models that give vectors, and "
                                   "this one generates text: add --runner pooling, or leave them out.")
        return None
    if family := encoder_family(pooling.architecture):
        config = ModelConfig.of_encoder(raw, family, source)
    else:
        network = causal_name(pooling.architecture)
        if network not in _MODELS:
            raise ModelConfigError(f"{source}: architecture {pooling.architecture} is not supported. Embeddings and "
                                   f"scores come from BERT, RoBERTa, XLM-RoBERTa, DistilBERT and MPNet encoders and "
                                   f"from {', '.join(supported_models())}.")
        config = ModelConfig.from_dict({**raw, "architectures": [network]}, source=source)
    if model_impl == "transformers":
        raise ModelConfigError(f"{source}: embeddings and scores come from native networks alone: leave "
                               "--model-impl transformers out.")
    return replace(config, pooling=pooling)


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
    if config.encoder is not None:
        return _build_encoder(config, ops, dtype, device)
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


def _build_encoder(config: ModelConfig, ops: ModuleType, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """It has what of the interface a network without a KV cache needs."""
    from xllm_models.encoder import EncoderModel

    computed = torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype
    model = EncoderModel(config, ops=ops, dtype=computed, device=device, storage_dtype=dtype)
    return model.eval()  # type: ignore[return-value]


def _transformers_class() -> type[LlamaForCausalLM]:
    """Imported here, since it takes seconds; it has the interface, not the parts."""
    from xllm_models.transformers_model import TransformersModel

    return TransformersModel  # type: ignore[return-value]
