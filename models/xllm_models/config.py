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

from xllm_models.config_defaults import complete
from xllm_models.config_keys import ConfigKeys, ModelConfigError, architecture_of, read_json
from xllm_models.encoder_config import EncoderConfig, read_encoder
from xllm_models.mla_config import MlaConfig, read_mla
from xllm_models.moe_config import MoeConfig, read_moe
from xllm_models.pooling_config import PoolingConfig
from xllm_models.rope_config import ROPE_TYPES, RopeConfig, read_local_rope, read_rope

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

_GEMMA = ("gemma2", "gemma3_text")
_SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # every so-manieth layer sees everything
_WINDOW_SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # "use_sliding_window" decides
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")


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
    num_kv_heads: int  # latent attention: 1, which every rank holds
    head_dim: int  # of queries and keys
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
    mla: MlaConfig | None = None  # latent attention; None: keys and values of their own
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of layers with a window, where theirs is another
    rope_interleaved: bool = False  # pairs are neighbours (2i, 2i + 1), not (i, i + half)
    attention_scale: float = 0.0  # on products of queries and keys; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # bounds attention scores by softcap * tanh(score / softcap); 0: none
    attention_sinks: bool = False  # a learned score a head that takes part in the softmax and has no value
    logit_softcap: float = 0.0  # the same for the logits
    norm: str = "plain"  # plain | plus_one: the factor is 1 + weight | float32: applied before rounding
    embedding_scaled: bool = False  # by the root of hidden_size
    qkv_fused: bool = False  # the checkpoint holds q, k and v in one matrix
    gate_up_fused: bool = False  # and the MLP's gate and up
    quantization: str = ""  # of the experts' matrices in the checkpoint: "" | mxfp4
    torch_dtype: str = "float32"  # the checkpoint's own, one of DTYPES
    eos_token_ids: tuple[int, ...] = ()  # config.json's, then those that generation_config.json adds
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    moe: MoeConfig | None = None  # None: every layer has a plain MLP
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # keys read nowhere above
    pooling: PoolingConfig | None = None  # how the network's output becomes a vector; None: it becomes text
    encoder: EncoderConfig | None = None  # an encoder, which has no KV cache; None: a decoder
    implementation: str = "native"  # native: a class of xllm_models.registry; transformers: its own modelling code

    @property
    def max_context_length(self) -> int:
        """Tokens the positions are good for; most scaled types state the length before scaling."""
        if self.rope.type in ("default", "llama3", "longrope") or self.model_type == "gemma3_text":
            return self.max_position_embeddings
        length = self.max_position_embeddings
        if self.rope.type == "yarn":
            length = self.rope.original_max_position_embeddings
        return int(length * self.rope.factor)

    @property
    def rotary_head_dim(self) -> int:
        """Of what rotates: whole heads, or the part that latent attention keeps for it."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def attention_width(self) -> int:
        """Values a token's attention works on in one layer: queries, keys, values, or what stands for them."""
        if self.mla is None:
            return self.num_heads * self.head_dim * 3
        return self.num_heads * (self.head_dim + self.mla.cache_width + self.mla.kv_lora_rank + self.mla.v_head_dim)

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
    def of_encoder(cls, config: Mapping[str, Any], family: str, source: str = "config.json") -> ModelConfig:
        """BERT and its relatives. Raises ModelConfigError."""
        keys = ConfigKeys(config, source)
        encoder, fields = read_encoder(config, family, source)
        _quantization(keys, fields["model_type"])
        return cls(architecture=architecture_of(config, source), torch_dtype=_dtype(keys), raw=config, encoder=encoder,
                   **fields)

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
        keys = ConfigKeys(complete(config), source)
        architecture = architecture_of(config, source)
        model_type = keys.text("model_type", "")
        quantization = _quantization(keys, model_type)
        hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        mla = read_mla(keys, model_type)
        num_layers = keys.count("num_hidden_layers")
        qkv_bias, output_bias = _attention_biases(keys, model_type)
        window, layer_windows = _sliding_windows(keys, model_type, num_layers)
        max_positions = keys.count("max_position_embeddings")
        head_dim = mla.qk_head_dim if mla else _head_dim(keys, hidden_size, num_heads)
        rope = read_rope(keys, model_type, max_positions)
        _check_factors(keys, rope, head_dim)
        generation_keys = ConfigKeys(generation or {}, str(Path(source).with_name("generation_config.json")))
        return cls(
            architecture=architecture,
            model_type=model_type,
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=1 if mla else _num_kv_heads(keys, num_heads),
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            hidden_act=_activation(keys, model_type),
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=qkv_bias,
            attention_output_bias=output_bias,
            mlp_bias=keys.flag("mlp_bias"),
            qk_norm=model_type in _QK_NORM or (model_type == "glm4_moe" and keys.flag("use_qk_norm")),
            sliding_window=window,
            layer_sliding_windows=layer_windows,
            mla=mla,
            rope=rope,
            local_rope=read_local_rope(keys, model_type, max_positions),
            rope_interleaved=model_type in ("glm", "glm4"),
            attention_scale=keys.positive_number("query_pre_attn_scalar", 256) ** -0.5 if model_type in _GEMMA else 0.0,
            attention_softcap=keys.number("attn_logit_softcapping", 0.0) if model_type == "gemma2" else 0.0,
            attention_sinks=model_type == "gpt_oss",
            logit_softcap=keys.number("final_logit_softcapping", 0.0) if model_type in _GEMMA else 0.0,
            norm="plus_one" if model_type in _GEMMA else "float32" if model_type == "gpt_oss" else "plain",
            embedding_scaled=model_type in _GEMMA,
            qkv_fused=model_type == "phi3",
            gate_up_fused=model_type in ("phi3", "glm", "glm4"),
            quantization=quantization,
            torch_dtype=_dtype(keys),
            eos_token_ids=tuple(
                dict.fromkeys(keys.ids("eos_token_id") + generation_keys.ids("eos_token_id"))
            ),
            bos_token_id=next(iter(keys.ids("bos_token_id")), None),
            pad_token_id=next(iter(keys.ids("pad_token_id")), None),
            generation=generation_defaults(generation_keys),
            moe=read_moe(keys, model_type, num_layers),
            raw=config,
        )


def _quantization(keys: ConfigKeys, model_type: str) -> str:
    if keys.flag("use_bidirectional_attention") and model_type in _GEMMA:
        raise keys.error("use_bidirectional_attention", "is true: decoders whose attention looks both ways are not "
                         "supported.")
    quantization = keys.get("quantization_config")
    if not quantization:
        return ""
    method = quantization
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown method")
    if method == "mxfp4" and model_type == "gpt_oss":
        return "mxfp4"
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


def _head_dim(keys: ConfigKeys, hidden_size: int, num_heads: int) -> int:
    default = None
    if keys.get("head_dim") is None:
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


def _activation(keys: ConfigKeys, model_type: str) -> str:
    if model_type in _GEMMA:  # some carry hidden_act too, from when it was read
        return keys.text("hidden_activation", "gelu_pytorch_tanh")
    return keys.text("hidden_act", "silu")


def _attention_biases(keys: ConfigKeys, model_type: str) -> tuple[bool, bool]:
    """(on q, k and v; on the output). Qwen2 has the first always, whatever its configuration says."""
    if model_type == "qwen2":
        return True, False
    if model_type == "qwen2_moe":
        return keys.flag("qkv_bias", True), False
    if model_type in ("mistral", "mixtral"):
        return False, False
    if model_type == "phi3":
        return False, False
    bias = keys.flag("attention_bias")
    return bias, bias and model_type not in ("glm", "glm4", "glm4_moe")


def _check_factors(keys: ConfigKeys, rope: RopeConfig, head_dim: int) -> None:
    count = int(head_dim * rope.partial_rotary_factor) // 2
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != count:
            raise keys.error("rope_scaling", f'has {len(factors)} numbers in "{name}"; {count} pairs of dimensions '
                                             "of a head are rotated.")


def _sliding_windows(keys: ConfigKeys, model_type: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """(the window, each layer's); 0 is none. Llama has none, though some of its files carry the key."""
    everywhere = (0,) * num_layers
    if model_type == "llama" or (model_type in _WINDOW_SWITCHED and not keys.flag("use_sliding_window")):
        if "sliding_attention" in (keys.get("layer_types") or ()) and model_type != "llama":
            problem = 'has sliding_attention layers, but "use_sliding_window" is not true.'
            raise keys.error("layer_types", problem)
        return 0, everywhere
    if keys.get("sliding_window") is None:
        return 0, everywhere
    window = keys.count("sliding_window")
    if model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):  # every layer; transformers ignores their layer_types
        return window, (window,) * num_layers
    sliding = _sliding_layers(keys, model_type, num_layers)
    return window, tuple(window if slides else 0 for slides in sliding)


def _sliding_layers(keys: ConfigKeys, model_type: str, num_layers: int) -> list[bool]:
    layer_types = keys.get("layer_types")
    if layer_types is None:
        if model_type in _SLIDING_PATTERN:
            every = keys.count("sliding_window_pattern", _SLIDING_PATTERN[model_type])
            return [(layer + 1) % every != 0 for layer in range(num_layers)]
        first = keys.get("max_window_layers") or 0
        if model_type == "qwen2_moe":  # every other layer below that one
            return [layer % 2 == 0 and layer < first for layer in range(num_layers)]
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


def generation_defaults(keys: ConfigKeys) -> GenerationDefaults:
    top_k = keys.optional_number("top_k")
    return GenerationDefaults(
        temperature=keys.optional_number("temperature"),
        top_p=keys.optional_number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=keys.optional_number("min_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
    )
