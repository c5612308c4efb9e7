"""What transformers knows of a checkpoint's architecture: whether it is a decoder-only language model, and its sizes.

Values come from transformers' own configuration class, so that every family's names and defaults are right. Reaches
transformers only when called. It does not know whether the network can run here: transformers_model.py tries that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xllm_models.config import DTYPES, ModelConfig, generation_defaults
from xllm_models.config_keys import ConfigKeys, ModelConfigError, architecture_of, read_json

log = logging.getLogger(__name__)

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_STATE_LAYERS = ("linear", "mamba", "conv", "recurrent", "ssm", "hybrid", "lightning", "rwkv")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_UNSTRETCHED = ("default", "llama3", "proportional")  # rope types whose max_position_embeddings is the whole length


def knows_causal_lm(config: Mapping[str, Any], source: str = "config.json") -> bool:
    """Whether transformers has this architecture as a language model of one stack."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    names = {name} if isinstance(name, str) else set(name or ())
    architecture = architecture_of(config, source)
    return architecture in names and architecture.endswith(_CAUSAL_SUFFIXES) and not config.get("is_encoder_decoder")


def read_config(path: Path) -> ModelConfig:
    """The model directory's config.json and generation_config.json. Raises ModelConfigError."""
    if path.suffix == ".gguf":
        raise ModelConfigError(f"{path}: .gguf files are for native models only. Give the safetensors checkpoint, or "
                               "leave --model_impl at auto.")
    raw = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = ConfigKeys(read_json(generation_file) if generation_file.is_file() else {}, str(generation_file))
    return _model_config(raw, hf_config(raw, str(path / "config.json")), generation, str(path / "config.json"))


def hf_config(raw: Mapping[str, Any], source: str = "config.json") -> Any:
    """transformers' configuration object; code beside the checkpoint is never looked at."""
    from transformers import AutoConfig

    model_type = str(raw.get("model_type"))
    own = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
    try:
        return AutoConfig.for_model(model_type, **own)
    except Exception as error:
        raise ModelConfigError(f"{source}: transformers does not understand it ({_line(error)}).") from error


def refuse_unknown(config: Mapping[str, Any], source: str, native: list[str]) -> None:
    """Raise for what transformers cannot run as a decoder-only model, saying which kind of thing it is."""
    architecture = architecture_of(config, source)
    if knows_causal_lm(config, source):
        return
    if config.get("is_encoder_decoder"):
        why = "It is an encoder-decoder, and this runtime serves decoder-only models."
    elif config.get("auto_map"):
        why = "It needs code that comes with the checkpoint, which is never run."
    else:
        why = "transformers has no decoder-only language model of that name either."
    raise ModelConfigError(f"{source}: architecture {architecture} is not supported. {why} Native ones are: "
                           f"{', '.join(native)}.")


def _model_config(raw: Mapping[str, Any], hf: Any, generation: ConfigKeys, source: str) -> ModelConfig:
    keys = ConfigKeys(raw, source)
    architecture = architecture_of(raw, source)
    if raw.get("quantization_config"):
        raise keys.error("quantization_config", "says the weights are quantized; through transformers' code only the "
                                                "model's bfloat16, float16 or float32 checkpoint runs.")
    _refuse_state(keys, hf)
    text = hf.get_text_config()
    num_heads, hidden_size = _size(text, keys, "num_attention_heads"), _size(text, keys, "hidden_size")
    eos = ConfigKeys({"eos_token_id": getattr(hf, "eos_token_id", None)}, source).ids("eos_token_id")
    return ModelConfig(
        architecture=architecture, model_type=text.model_type, implementation="transformers",
        vocab_size=_size(text, keys, "vocab_size"), hidden_size=hidden_size,
        intermediate_size=_first(text, ("intermediate_size", "ffn_dim", "n_inner"), 4 * hidden_size),
        num_layers=_size(text, keys, "num_hidden_layers"), num_heads=num_heads,
        num_kv_heads=_first(text, ("num_key_value_heads", "num_kv_heads"), num_heads),
        head_dim=_first(text, ("head_dim",), max(1, hidden_size // num_heads)),
        max_position_embeddings=_longest(text, keys), torch_dtype=_dtype(hf, keys),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys(eos + generation.ids("eos_token_id"))),
        bos_token_id=_id(getattr(hf, "bos_token_id", None)), pad_token_id=_id(getattr(hf, "pad_token_id", None)),
        generation=generation_defaults(generation), raw=raw,
    )


def _refuse_state(keys: ConfigKeys, hf: Any) -> None:
    kinds = {str(kind) for kind in getattr(hf.get_text_config(), "layer_types", None) or ()}
    stateful = sorted(kind for kind in kinds if any(word in kind for word in _STATE_LAYERS))
    if stateful:
        raise keys.error("layer_types", f"has {', '.join(stateful)}: layers that keep a state beside the KV cache "
                                        "(linear attention, SSM, convolution) are not supported.")


def _longest(text: Any, keys: ConfigKeys) -> int:
    """Tokens the positions are good for, as a batch of many lengths needs it.

    transformers switches the frequencies of "dynamic" and "longrope" by the longest sequence of a batch, so there a
    context ends where the switch would.
    """
    length = _first(text, _LENGTH_KEYS, 0)
    if not length:
        raise keys.error("max_position_embeddings", "is missing, so the longest context is unknown.")
    rope = getattr(text, "rope_parameters", None) or {}
    lengths = [length]
    for one in [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, Mapping)]:
        kind, factor = one.get("rope_type", "default"), float(one.get("factor") or 1.0)
        original = int(one.get("original_max_position_embeddings")
                       or getattr(text, "original_max_position_embeddings", None) or length)
        if kind in ("dynamic", "longrope"):
            lengths.append(min(length, original))
        elif kind == "yarn":
            lengths.append(max(length, int(original * factor)))
        elif kind not in _UNSTRETCHED:
            lengths.append(int(length * factor))
    return min(lengths[1:]) if len(lengths) > 1 else length


def _dtype(hf: Any, keys: ConfigKeys) -> str:
    name = str(hf.dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise keys.error("dtype", f'is "{name}"; supported: {", ".join(DTYPES)}.')
    return name


def _size(text: Any, keys: ConfigKeys, name: str) -> int:
    value = _get(text, name)
    if not isinstance(value, int) or value <= 0:
        raise keys.error(name, "is missing or no positive whole number.")
    return value


def _first(text: Any, names: tuple[str, ...], default: int) -> int:
    values = (_get(text, name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def _get(text: Any, name: str) -> Any:
    """None also where the layers differ and transformers refuses to name one value."""
    try:
        return getattr(text, name, None)
    except RuntimeError:
        return None


def _id(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and first >= 0 else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
