"""What a checkpoint says about its network: one frozen `ModelConfig`, read from config.json or GGUF metadata.

An absent key takes the value that transformers gives it for that model type. Every complaint is a
`ModelConfigError` naming the key and the file. Dtypes are strings: importing this module reaches neither
torch nor transformers. It does not know which architectures exist here (xllm_models.registry does), nor how
long a context the user asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xllm_models.config_keys import ConfigKeys, ModelConfigError, architecture_of, read_json
from xllm_models.rope_config import ROPE_TYPES, RopeConfig, read_rope

__all__ = [
    "DTYPES",
    "ROPE_TYPES",
    "GenerationDefaults",
    "ModelConfig",
    "ModelConfigError",
    "RopeConfig",
    "architecture_of",
]

DTYPES = ("float32", "bfloat16", "float16")

# Values that transformers assumes for an absent key, where they differ between model types.
_DEFAULT_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_DEFAULT_SPECIAL_IDS = {"llama": (1, 2), "mistral": (1, 2)}  # bos, eos
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_MAX_WINDOW_LAYERS = 28


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
    rope: RopeConfig = field(default_factory=RopeConfig)
    torch_dtype: str = "float32"  # the checkpoint's own, one of DTYPES
    eos_token_ids: tuple[int, ...] = ()  # config.json's, then those that generation_config.json adds
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # keys read nowhere above

    @property
    def max_context_length(self) -> int:
        """Tokens the positions are good for; most scaled types state the length before scaling."""
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
        generation = read_json(generation_file) if generation_file.is_file() else None
        return cls.from_dict(read_json(config_file), generation, source=str(config_file))

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelConfig:
        from xllm_models.weights.gguf_config import hf_config_of  # the gguf package is needed here only

        config, generation = hf_config_of(path)
        return cls.from_dict(config, generation, source=str(path))

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> ModelConfig:
        """`generation` is generation_config.json's content; `source` is what error messages call `config`."""
        keys = ConfigKeys(config, source)
        architecture = architecture_of(config, source)
        _refuse_quantized(keys)
        model_type = keys.text("model_type", "")
        hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        num_layers = keys.count("num_hidden_layers")
        qkv_bias, output_bias = _attention_biases(keys, model_type)
        window, layer_windows = _sliding_windows(keys, model_type, num_layers)
        max_positions = keys.count("max_position_embeddings")
        generation_keys = ConfigKeys(generation or {}, str(Path(source).with_name("generation_config.json")))
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
            rope=read_rope(keys, max_positions),
            torch_dtype=_dtype(keys),
            eos_token_ids=tuple(
                dict.fromkeys(keys.ids("eos_token_id", default_eos) + generation_keys.ids("eos_token_id"))
            ),
            bos_token_id=next(iter(keys.ids("bos_token_id", default_bos)), None),
            pad_token_id=next(iter(keys.ids("pad_token_id")), None),
            generation=_generation_defaults(generation_keys),
            raw=config,
        )


def _refuse_quantized(keys: ConfigKeys) -> None:
    quantization = keys.get("quantization_config")
    if quantization:
        method = quantization
        if isinstance(quantization, Mapping):
            method = quantization.get("quant_method", "unknown method")
        raise keys.error(
            "quantization_config",
            f"says the weights are quantized ({method}); use the model's bfloat16, float16 or float32 "
            "checkpoint, or a .gguf file.",
        )


def _num_kv_heads(keys: ConfigKeys, num_heads: int) -> int:
    num_kv_heads = keys.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads={num_heads}.",
        )
    return num_kv_heads


def _head_dim(keys: ConfigKeys, model_type: str, hidden_size: int, num_heads: int) -> int:
    default = _DEFAULT_HEAD_DIM.get(model_type)
    if keys.get("head_dim") is None and default is None:
        if hidden_size % num_heads:
            raise keys.error(
                "head_dim",
                f"is missing, and hidden_size={hidden_size} is no multiple of the {num_heads} heads.",
            )
        default = hidden_size // num_heads
    head_dim = keys.count("head_dim", default)
    if head_dim % 2:
        raise keys.error("head_dim", f"must be even for rotary embeddings, not {head_dim}.")
    return head_dim


def _attention_biases(keys: ConfigKeys, model_type: str) -> tuple[bool, bool]:
    """(on q, k and v; on the output). Qwen2 has the first always, whatever its configuration says."""
    if model_type == "qwen2":
        return True, False
    if model_type == "mistral":
        return False, False
    bias = keys.flag("attention_bias")
    return bias, bias


def _sliding_windows(keys: ConfigKeys, model_type: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """(the window, each layer's); 0 is none. Llama has none, though some of its files carry the key."""
    everywhere = (0,) * num_layers
    if model_type == "llama" or (model_type in ("qwen2", "qwen3") and not keys.flag("use_sliding_window")):
        if "sliding_attention" in (keys.get("layer_types") or ()) and model_type != "llama":
            problem = 'has sliding_attention layers, but "use_sliding_window" is not true.'
            raise keys.error("layer_types", problem)
        return 0, everywhere
    if keys.has("sliding_window") and keys.get("sliding_window") is None:
        return 0, everywhere
    default = _DEFAULT_SLIDING_WINDOW.get(model_type)
    if not keys.has("sliding_window") and default is None:
        return 0, everywhere
    window = keys.count("sliding_window", default)
    if model_type == "mistral":  # every layer; transformers ignores its layer_types
        return window, (window,) * num_layers
    sliding = _sliding_layers(keys, model_type, num_layers)
    return window, tuple(window if slides else 0 for slides in sliding)


def _sliding_layers(keys: ConfigKeys, model_type: str, num_layers: int) -> list[bool]:
    layer_types = keys.get("layer_types")
    if layer_types is None:
        first = keys.get("max_window_layers")
        if first is None:
            first = _DEFAULT_MAX_WINDOW_LAYERS if model_type in ("qwen2", "qwen3") else 0
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) < num_layers:
        problem = f"must name the attention of all {num_layers} layers, not {layer_types!r}."
        raise keys.error("layer_types", problem)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        problem = f"has {sorted(map(str, unknown))}; known: full_attention, sliding_attention."
        raise keys.error("layer_types", problem)
    return [name == "sliding_attention" for name in layer_types[:num_layers]]


def _dtype(keys: ConfigKeys) -> str:
    key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    name = keys.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise keys.error(key, f'is "{name}"; supported: {", ".join(DTYPES)}.')
    return name


def _generation_defaults(keys: ConfigKeys) -> GenerationDefaults:
    top_k = keys.optional_number("top_k")
    return GenerationDefaults(
        temperature=keys.optional_number("temperature"),
        top_p=keys.optional_number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=keys.optional_number("min_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
    )
