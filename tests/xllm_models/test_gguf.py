"""GGUF files written by the gguf package itself: configuration, tensors, damage."""

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from xllm_models.config import ModelConfig, ModelConfigError
from xllm_models.weights.gguf_config import hf_config_of
from xllm_models.weights.gguf_export import export_hf_model
from xllm_models.weights.gguf_source import GgufSource
from xllm_models.weights.source import WeightError, open_source

HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 40
QUANTS = {"attn_v": Q.Q8_0, "ffn_gate": Q.Q4_0, "ffn_up": Q.Q4_1, "ffn_down": Q.BF16, "attn_output": Q.F16}


def hf_tensors(architecture="llama", tied=False):
    """One layer under Hugging Face's names, float32."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN),
        "model.norm.weight": draw(HIDDEN),
        layer + "input_layernorm.weight": draw(HIDDEN),
        layer + "post_attention_layernorm.weight": draw(HIDDEN),
        layer + "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": draw(MIDDLE, HIDDEN),
        layer + "mlp.up_proj.weight": draw(MIDDLE, HIDDEN),
        layer + "mlp.down_proj.weight": draw(HIDDEN, MIDDLE),
    }
    if architecture == "qwen2":
        tensors |= {
            layer + f"self_attn.{x}_proj.bias": draw(n * HEAD_DIM) for x, n in zip("qkv", (HEADS, 2, 2))
        }
    if architecture == "qwen3":
        tensors |= {layer + f"self_attn.{x}_norm.weight": draw(HEAD_DIM) for x in "qk"}
    if not tied:
        tensors["lm_head.weight"] = draw(VOCAB, HIDDEN)
    return tensors


def interleave(weight, heads):
    """What llama.cpp's converter does to q and k of "llama" models."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    path, architecture="llama", tied=False, quantized=False, meta=None, extra=None, tokens=(), merges=()
):
    """Returns {Hugging Face name: the float32 values that the file holds}."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    if merges:
        writer.add_token_merges(list(merges))
    for key, value in (meta or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    names = gguf.get_tensor_name_map(writer_arch(architecture), 1)
    held = {}
    for name, values in hf_tensors(architecture, tied).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        part = own.split(".")[2] if own.startswith("blk.") else own
        quant = QUANTS.get(part, Q.F32) if quantized and values.ndim == 2 else Q.F32
        stored = values
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            stored = interleave(values, HEADS if part == "attn_q" else KV_HEADS)
        packed = gguf.quantize(stored, quant)
        writer.add_tensor(own, packed, raw_dtype=None if quant in (Q.F32, Q.F16) else quant)
        held[name] = gguf.dequantize(packed, quant) if quant != Q.F32 else values
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def writer_arch(architecture):
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def whole(source, names=None):
    return {n: tuple(slice(0, s) for s in source.tensors[n].shape) for n in names or source.tensors}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_under_hugging_face_names(tmp_path, architecture, quantized):
    held = write_gguf(tmp_path / "m.gguf", architecture, quantized=quantized)
    source = open_source(tmp_path / "m.gguf")
    assert isinstance(source, GgufSource)
    assert {name: info.shape for name, info in source.tensors.items()} == {
        n: v.shape for n, v in held.items()
    }
    seen = dict(source.stream(whole(source)))
    for name, values in held.items():
        assert torch.equal(seen[name].float(), torch.from_numpy(values)), name


def test_regions_equal_regions_of_the_whole(tmp_path):
    held = write_gguf(tmp_path / "m.gguf", quantized=True)
    source = GgufSource(tmp_path / "m.gguf")
    for dim in (0, 1):
        regions = {}
        for name, info in source.tensors.items():
            region = [slice(0, size) for size in info.shape]
            if dim < len(region):
                region[dim] = slice(info.shape[dim] // 2, info.shape[dim])
            regions[name] = tuple(region)
        for name, tensor in source.stream(regions):
            assert torch.equal(tensor.float(), torch.from_numpy(held[name])[regions[name]]), (name, dim)


@pytest.mark.parametrize(
    ("architecture", "name", "biased"),
    [
        ("llama", "LlamaForCausalLM", False),
        ("qwen2", "Qwen2ForCausalLM", True),
        ("qwen3", "Qwen3ForCausalLM", False),
    ],
)
def test_config(tmp_path, architecture, name, biased):
    write_gguf(tmp_path / "m.gguf", architecture)
    config = ModelConfig.from_path(tmp_path / "m.gguf")
    assert (config.architecture, config.model_type) == (name, architecture)
    shape = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers)
    assert shape == (VOCAB, HIDDEN, MIDDLE, 1)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope.theta) == (128, 1e-5, 500000.0)
    assert (config.attention_bias, config.qk_norm) == (biased, architecture == "qwen3")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert (config.rope.type, config.tie_word_embeddings, config.sliding_window) == ("default", False, 0)


def test_tied_output_dtype_and_end_of_turn_tokens(tmp_path):
    tokens = ["a", "<s>", "</s>", "<|eot_id|>", "<|other|>"]
    write_gguf(tmp_path / "m.gguf", tied=True, meta={"tokenizer.ggml.eot_token_id": 7}, tokens=tokens)
    config = ModelConfig.from_gguf(tmp_path / "m.gguf")
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 7, 3)
    assert config.torch_dtype == "float32"


def test_a_llama_with_a_sliding_window_is_a_mistral(tmp_path):
    write_gguf(tmp_path / "m.gguf", meta={"llama.attention.sliding_window": 32})
    config = ModelConfig.from_gguf(tmp_path / "m.gguf")
    assert (config.architecture, config.layer_sliding_windows) == ("MistralForCausalLM", (32,))


def test_linear_and_yarn_scaling(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    write_gguf(tmp_path / "linear.gguf", meta=linear)
    rope = ModelConfig.from_gguf(tmp_path / "linear.gguf").rope
    assert (rope.type, rope.factor) == ("linear", 2.5)
    write_gguf(tmp_path / "old.gguf", meta={"llama.rope.scale_linear": 4.0})
    assert ModelConfig.from_gguf(tmp_path / "old.gguf").rope.factor == 4.0
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    write_gguf(tmp_path / "yarn.gguf", "qwen2", meta=yarn)
    rope = ModelConfig.from_gguf(tmp_path / "yarn.gguf").rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert rope.cos_sin_scale == pytest.approx(0.1 * math.log(4) + 1)
    write_gguf(tmp_path / "scaled.gguf", "qwen2", meta=yarn | {"qwen2.rope.scaling.attn_factor": 0.5})
    rope = ModelConfig.from_gguf(tmp_path / "scaled.gguf").rope
    assert rope.cos_sin_scale == pytest.approx(0.05 * math.log(4) + 0.5)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 2048)],
)
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path, factor, low, high, original):
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    meta = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=128, rope_parameters=parameters))
    plain = 5e5 ** (-np.arange(64) / 64)
    factors = (plain / scaled.numpy()).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", meta=meta, extra={"rope_freqs.weight": factors})
    rope = ModelConfig.from_gguf(tmp_path / "m.gguf").rope
    assert (rope.type, rope.factor, rope.low_freq_factor) == ("llama3", factor, 1.0)
    assert rope.high_freq_factor == pytest.approx(high, rel=1e-3)
    assert rope.original_max_position_embeddings == pytest.approx(original, rel=1e-3)


def test_factors_that_are_no_llama3_scaling_are_refused(tmp_path):
    odd = np.array([1, 3, 1, 5, 1, 2, 1, 8], np.float32)
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": odd})
    with pytest.raises(ModelConfigError, match=r"m\.gguf: rope_freqs\.weight is no llama3 scaling"):
        ModelConfig.from_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "longrope.*supported: none",
        ),
        ({"split.count": 3}, "one of 3 parts.*--merge"),
    ],
)
def test_unsupported_files_say_what_to_do(tmp_path, meta, message):
    write_gguf(tmp_path / "m.gguf", meta=meta)
    with pytest.raises(ModelConfigError, match=message):
        hf_config_of(tmp_path / "m.gguf")


def test_other_architectures_are_refused_with_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match=r'"gemma2" model.*llama, qwen2, qwen3'):
        GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [3, 20, 900, -64])
def test_truncated_files_are_named(tmp_path, keep):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightError, match=f"{file} is truncated"):
        GgufSource(file)


def test_no_file_and_no_gguf(tmp_path):
    with pytest.raises(WeightError, match="does not exist"):
        GgufSource(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"something else entirely, long enough")
    with pytest.raises(WeightError, match=r"no \.gguf file"):
        GgufSource(tmp_path / "m.gguf")


def test_missing_metadata_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelConfigError, match=r"llama\.embedding_length"):
        ModelConfig.from_gguf(tmp_path / "m.gguf")


def test_integer_tensors_are_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_norm.bias": np.zeros(4, np.int32)})
    source = GgufSource(tmp_path / "m.gguf")
    with pytest.raises(WeightError, match=r"blk\.0\.ffn_norm\.bias in .* has type I32"):
        dict(source.stream(whole(source)))


def test_an_exported_directory_holds_the_same_model(tmp_path):
    tokens = ["<unk>", "<|bos|>", "<|eos|>", "a", "b", "Ġ", "ab", "<|im_end|>"]
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    held = write_gguf(
        tmp_path / "m.gguf", quantized=True, tied=True, meta=meta, tokens=tokens, merges=["a b"]
    )
    export_hf_model(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    exported, original = ModelConfig.from_dir(tmp_path / "out"), ModelConfig.from_gguf(tmp_path / "m.gguf")
    assert exported == original
    source = open_source(tmp_path / "out")
    for name, tensor in source.stream(whole(source)):
        assert torch.equal(tensor, torch.from_numpy(held.pop(name)))
    assert not held
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab ba<|im_end|>")["input_ids"] == [6, 5, 4, 3, 7]
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert config.eos_token_id == [2, 7]
