"""What a checkpoint says about its network: one frozen `ModelConfig`, read from config.json or GGUF metadata.

Understands both spellings of Hugging Face configurations: `rope_theta` and `rope_scaling` beside each other, and
`rope_parameters` holding both. A key that is absent takes the value that transformers gives it for that model type.
Every complaint is a `ModelConfigError` naming the key and the file. Dtypes are strings: importing this module
reaches neither torch nor transformers. It does not know which architectures exist here (xllm_models.registry does)
nor how long a context the user asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

# Values that transformers assumes for an absent key, where they differ between model types.
_DEFAULT_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_SPECIAL_IDS = {"llama": (1, 2), "mistral": (1, 2)}  # bos, eos
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_MAX_WINDOW_LAYERS = 28


class ModelConfigError(ValueError):
    """A model's configuration is missing a key, contradicts itself, or asks for what is not supported."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields a type does not use keep their defaults."""

    theta: float = 10000.0
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # dynamic: the model's max_position_embeddings
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived, see cos_sin_scale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: correction range rounded to whole dimensions
    partial_rotary_factor: float = 1.0

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin; 1 but for yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json advises for requests that leave a field out; None: it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # "LlamaForCausalLM"
    model_type: str  # "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on the q, k and v projections
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each query and key head
    sliding_window: int = 0  # 0: none
    layer_sliding_windows: tuple[int, ...] = ()  # [num_layers]; 0: that layer sees everything
    rope: RopeConfig = RopeConfig()
    torch_dtype: str = "float32"  # the checkpoint's own, one of DTYPES
    eos_token_ids: tuple[int, ...] = ()  # config.json's, then those that generation_config.json adds
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    generation: GenerationDefaults = GenerationDefaults()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # for keys read nowhere above

    @property
    def max_context_length(self) -> int:
        """Tokens the positions are good for. Scaled types other than llama3 state the length before scaling."""
        if self.rope.type in ("default", "llama3"):
            return self.max_position_embeddings
        length = self.max_position_embeddings
        if self.rope.type == "yarn":
            length = self.rope.original_max_position_embeddings
        return int(length * self.rope.factor)

    @classmethod
    def from_path(cls, path: str | Path) -> ModelConfig:
        """A directory with a config.json, or a .gguf file."""
        path = Path(path)
        return cls.from_gguf(path) if path.suffix == ".gguf" else cls.from_dir(path)

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json."""
        config_file = Path(path) / "config.json"
        generation_file = Path(path) / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.is_file() else None
        return cls.from_dict(_read_json(config_file), generation, source=str(config_file))

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelConfig:
        from xllm_models.weights.gguf_config import hf_config_of  # the gguf package is needed here only

        config, generation = hf_config_of(path)
        return cls.from_dict(config, generation, source=str(path))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, source: str = "config.json"
    ) -> ModelConfig:
        """`source` is what error messages call the configuration; `generation` is generation_config.json's content."""
        keys = _Keys(config, source)
        architecture = architecture_of(config, source)
        _refuse_quantized(keys)
        model_type = keys.text("model_type", "")
        hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        num_layers = keys.count("num_hidden_layers")
        qkv_bias, output_bias = _attention_biases(keys, model_type)
        window, layer_windows = _sliding_windows(keys, model_type, num_layers)
        max_positions = keys.count("max_position_embeddings")
        generation_keys = _Keys(generation or {}, str(Path(source).with_name("generation_config.json")))
        default_bos, default_eos = _DEFAULT_SPECIAL_IDS.get(model_type, (None, None))
        return cls(
            architecture=architecture,
            model_type=model_type,
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(keys, num_heads),
            head_dim=_head_dim(keys, model_type, hidden_size, num_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            hidden_act=keys.text("hidden_act", "silu"),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=qkv_bias,
            attention_output_bias=output_bias,
            mlp_bias=keys.flag("mlp_bias"),
            qk_norm=model_type == "qwen3",
            sliding_window=window,
            layer_sliding_windows=layer_windows,
            rope=_rope(keys, max_positions),
            torch_dtype=_dtype(keys),
            eos_token_ids=tuple(
                dict.fromkeys(keys.ids("eos_token_id", default_eos) + generation_keys.ids("eos_token_id"))
            ),
            bos_token_id=next(iter(keys.ids("bos_token_id", default_bos)), None),
            pad_token_id=next(iter(keys.ids("pad_token_id")), None),
            generation=_generation_defaults(generation_keys),
            raw=config,
        )


def architecture_of(config: Mapping[str, Any], source: str = "config.json") -> str:
    """The class name that says which network this is, readable even where nothing else of it is understood."""
    names = config.get("architectures")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type:  # configurations saved without a model carry no class name
        return model_type.capitalize() + "ForCausalLM"
    raise ModelConfigError(
        f'{source}: "architectures" is missing, so the kind of model is unknown. Set it to a list with the '
        'class name, for example ["LlamaForCausalLM"].'
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{file} does not exist. A model directory holds config.json, *.safetensors and the tokenizer's files."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{file} holds {type(content).__name__}, not an object with keys. Download it again.")
    return content


class _Keys:
    """Typed access to a configuration's keys; an absent key and a null one are the same, but for `has`."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f'{self.source}: "{key}" {problem}')

    def get(self, key: str) -> Any:
        return self.config.get(key)

    def has(self, key: str) -> bool:
        return key in self.config

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, f"is missing ({architecture_of(self.config, self.source)} needs it).")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, f"must be a positive whole number, not {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a number, not {value!r}.")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}.")
        return value or default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}.")
        return default if value is None else value

    def ids(self, key: str, default: int | None = None) -> list[int]:
        value = self.get(key) if self.has(key) else default
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}.")
        return [v for v in values if v >= 0]  # some checkpoints write -1 for "none"


def _refuse_quantized(keys: _Keys) -> None:
    quantization = keys.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise keys.error(
            "quantization_config",
            f"says the weights are quantized ({method}); use the bfloat16, float16 or float32 checkpoint, or a .gguf.",
        )


def _num_kv_heads(keys: _Keys, num_heads: int) -> int:
    num_kv_heads = keys.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide num_attention_heads={num_heads}.")
    return num_kv_heads


def _head_dim(keys: _Keys, model_type: str, hidden_size: int, num_heads: int) -> int:
    default = _DEFAULT_HEAD_DIM.get(model_type)
    if keys.get("head_dim") is None and default is None:
        if hidden_size % num_heads:
            raise keys.error(
                "head_dim", f"is missing and hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}."
            )
        default = hidden_size // num_heads
    head_dim = keys.count("head_dim", default)
    if head_dim % 2:
        raise keys.error("head_dim", f"must be even for rotary embeddings, not {head_dim}.")
    return head_dim


def _attention_biases(keys: _Keys, model_type: str) -> tuple[bool, bool]:
    """(on q, k and v; on the output). Qwen2 has the first always, whatever its configuration says."""
    if model_type == "qwen2":
        return True, False
    if model_type == "mistral":
        return False, False
    bias = keys.flag("attention_bias")
    return bias, bias


def _sliding_windows(keys: _Keys, model_type: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """(the window, each layer's); 0 is none. Llama has no windows, though some of its configurations carry the key."""
    everywhere = (0,) * num_layers
    if model_type == "llama" or (model_type in ("qwen2", "qwen3") and not keys.flag("use_sliding_window")):
        if "sliding_attention" in (keys.get("layer_types") or ()) and model_type != "llama":
            raise keys.error("layer_types", 'has sliding_attention layers, but "use_sliding_window" is not true.')
        return 0, everywhere
    if keys.has("sliding_window") and keys.get("sliding_window") is None:
        return 0, everywhere
    default = _DEFAULT_SLIDING_WINDOW.get(model_type)
    if not keys.has("sliding_window") and default is None:
        return 0, everywhere
    window = keys.count("sliding_window", default)
    if model_type == "mistral":  # every layer; transformers ignores its layer_types
        return window, (window,) * num_layers
    return window, tuple(window if sliding else 0 for sliding in _sliding_layers(keys, model_type, num_layers))


def _sliding_layers(keys: _Keys, model_type: str, num_layers: int) -> list[bool]:
    layer_types = keys.get("layer_types")
    if layer_types is None:
        first = keys.get("max_window_layers")
        if first is None:
            first = _DEFAULT_MAX_WINDOW_LAYERS if model_type in ("qwen2", "qwen3") else 0
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) < num_layers:
        raise keys.error("layer_types", f"must name the attention of all {num_layers} layers, not {layer_types!r}.")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise keys.error("layer_types", f"has {sorted(map(str, unknown))}; known: full_attention, sliding_attention.")
    return [name == "sliding_attention" for name in layer_types[:num_layers]]


def _rope(keys: _Keys, max_positions: int) -> RopeConfig:
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    scaling = keys.get(name) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise keys.error(name, "must be one flat object: rotary settings that differ by layer are not supported.")
    # Of the two spellings, values inside the object win over the same names beside it, as in transformers.
    outside = {k: keys.get(k) for k in ("rope_theta", "partial_rotary_factor") if keys.get(k) is not None}
    rope = _Keys({**outside, **scaling}, f'{keys.source}, "{name}"')
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise keys.error(name, f'has rope_type "{kind}", which is not supported. Known: {", ".join(ROPE_TYPES)}.')
    original = max_positions
    if kind in ("llama3", "yarn"):
        outer = keys.get("original_max_position_embeddings")  # wins over the inner one, as in transformers
        original = keys.count("original_max_position_embeddings", None) if outer else rope.count(
            "original_max_position_embeddings", max_positions
        )
    return RopeConfig(
        theta=_positive(rope, "rope_theta", 10000.0),
        type=kind,
        factor=_rope_factor(rope, kind, max_positions / original),
        original_max_position_embeddings=original,
        low_freq_factor=_required(rope, "low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=_required(rope, "high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        partial_rotary_factor=_positive(rope, "partial_rotary_factor", 1.0),
    )


def _rope_factor(rope: _Keys, kind: str, length_ratio: float) -> float:
    if kind == "default":
        return 1.0
    if kind == "yarn" and rope.get("factor") is None:
        return length_ratio
    factor = _required(rope, "factor")
    if factor < 1:
        raise rope.error("factor", f"must be at least 1, not {factor:g}.")
    return factor


def _required(keys: _Keys, key: str) -> float:
    value = keys.optional_number(key)
    if value is None:
        raise keys.error(key, "is missing (the rope_type needs it).")
    return value


def _positive(keys: _Keys, key: str, default: float) -> float:
    value = keys.number(key, default)
    if value <= 0:
        raise keys.error(key, f"must be above 0, not {value:g}.")
    return value


def _dtype(keys: _Keys) -> str:
    key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    name = keys.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise keys.error(key, f'is "{name}"; supported: {", ".join(DTYPES)}.')
    return name


def _generation_defaults(keys: _Keys) -> GenerationDefaults:
    top_k = keys.optional_number("top_k")
    return GenerationDefaults(
        temperature=keys.optional_number("temperature"),
        top_p=keys.optional_number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=keys.optional_number("min_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
    )
