"""Whole networks against transformers: prefill, chunks and decode through a shuffled paged cache, in float32."""

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)
from xllm_models.config import ModelConfig
from xllm_models.registry import UnsupportedModelError, build_model, get_model_class, register_model

from tests.support.paged_model import PagedModel

VOCAB = 160
TOLERANCE = 3e-4  # of logits of about 10; float32 sums in another order
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = {
    **LATENT, "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
DEEPSEEK_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
               "routed_scaling_factor": 2.5}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied-biased": (LlamaForCausalLM, LlamaConfig, {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "llama-dynamic": (LlamaForCausalLM, LlamaConfig, {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-windowed": (Qwen2ForCausalLM, Qwen2Config, {
        "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-windowed": (MistralForCausalLM, MistralConfig, {"sliding_window": 12}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5, "sliding_window": 12}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {
        **EXPERTS, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 12,
        "max_window_layers": 2}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {
        **EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek-v2-groups-biased-yarn": (DeepseekV2ForCausalLM, DeepseekV2Config, {
        **DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**DEEPSEEK, **GROUPS}),
    "deepseek-v3-yarn": (DeepseekV3ForCausalLM, DeepseekV3Config, {
        **DEEPSEEK, **GROUPS, "rope_parameters": DEEPSEEK_YARN, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "deepseek-v3-halves-direct": (DeepseekV3ForCausalLM, DeepseekV3Config, {
        **DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_interleave": False, "q_lora_rank": None,
        "attention_bias": True}),
    "glm4-moe-lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, {
        **DEEPSEEK, **GROUPS, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "youtu": (YoutuForCausalLM, YoutuConfig, LATENT),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"pad_token_id": 0}),
    "phi3-partial-windowed-tied": (Phi3ForCausalLM, Phi3Config, {
        "pad_token_id": 0, "sliding_window": 12, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "glm": (GlmForCausalLM, GlmConfig, {"pad_token_id": 0, "head_dim": 16}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"pad_token_id": 0, "head_dim": 16}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {
        "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 8.0}),
    "gemma2-uncapped-biased": (Gemma2ForCausalLM, Gemma2Config, {
        "head_dim": 16, "sliding_window": 12, "attention_bias": True, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "tie_word_embeddings": False}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {
        "head_dim": 16, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {
        **GLM_EXPERTS, "pad_token_id": 0, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-groups": (Glm4MoeForCausalLM, Glm4MoeConfig, {
        **GLM_EXPERTS, "pad_token_id": 0, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "norm_topk_prob": False, "first_k_dense_replace": 2}),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {
        "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False,
                            "original_max_position_embeddings": 32}}),
}

FEW = ("llama", "qwen3-moe", "deepseek-v3", "gemma3", "gpt-oss", "phi3-partial-windowed-tied")
# For what depends little on the architecture.
mostly_slow = pytest.mark.parametrize("case", [
    pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in CASES], indirect=True)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(directory, transformers' model)"""
    model_class, config_class, changes = CASES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | changes)).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, model


def tokens(count, seed):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def close(ours, expected):
    assert ours.dtype == torch.float32
    assert expected.std() > 0.5  # not degenerate
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow  # the next one meets the same code
def test_whole_prefill(case):
    directory, model = case
    paged, prompts = PagedModel(directory), [tokens(37, 1), tokens(5, 2)]
    for ours, ids in zip(paged.logits(list(enumerate(prompts))), prompts):
        close(ours, expected_logits(model, ids))


def test_chunks_and_decode_in_mixed_batches(case):
    directory, model = case
    paged, first, second = PagedModel(directory, block_size=8), tokens(50, 3), tokens(47, 4)
    ours = {0: [paged.logits([(0, first[:20])])[0]], 1: []}
    ours[0] += paged.logits([(0, first[20:43])])
    for step in range(7):
        chunk = second[6 * step : 6 * step + 6]
        for row, logits in enumerate(paged.logits([(0, [first[43 + step]]), (1, chunk)])):
            ours[row].append(logits)
    for token in second[42:]:
        ours[1] += paged.logits([(1, [token])])
    close(torch.cat(ours[0]), expected_logits(model, first))
    close(torch.cat(ours[1]), expected_logits(model, second))


def test_reference_operators_and_attention_agree(case):
    directory, model = case
    paged, ids = PagedModel(directory, kernels="torch", attention="torch"), tokens(30, 5)
    ours = torch.cat([paged.logits([(0, ids[:20])])[0], paged.logits([(0, ids[20:])])[0]])
    close(ours, expected_logits(model, ids))


@mostly_slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_stays_near(case, dtype):
    directory, model = case
    paged, ids = PagedModel(directory, dtype=dtype), tokens(30, 6)
    assert paged.backend.spec.dtype == dtype
    ours = torch.cat([paged.logits([(0, ids[:20])])[0], *(paged.logits([(0, [t])])[0] for t in ids[20:])])
    expected = expected_logits(model, ids)
    # Of the usual token: where two experts score alike, rounding decides which one a token visits.
    error = ((ours - expected).abs().mean(dim=-1) / expected.std()).median()
    assert error < (0.15 if dtype == torch.bfloat16 else 0.02)


def test_dynamic_rope_beyond_the_trained_length(tmp_path):
    """A prompt within the length, then generation past it: transformers' own numbers (see layers.rotary)."""
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"max_position_embeddings": 16}, rope_parameters=rope)).eval()
    model.save_pretrained(tmp_path)
    paged, ids = PagedModel(tmp_path), tokens(10, 7)
    generated = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None,
                               pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    new = generated.sequences[0, 10:].tolist()
    ours = [paged.logits([(0, ids)])[0][-1:]] + [paged.logits([(0, [t])])[0] for t in new[:-1]]
    close(torch.cat(ours), torch.cat(generated.logits))


@mostly_slow
def test_weights_can_be_loaded_again(case):
    from xllm_models.weights.loader import load_weights
    from xllm_models.weights.source import open_source

    directory, model = case
    paged, ids = PagedModel(directory), tokens(9, 8)
    paged.model.allocate_weights()
    load_weights(paged.model, open_source(directory))
    close(paged.logits([(0, ids)])[0], expected_logits(model, ids))


def test_unknown_architectures_and_activations_are_refused(case):
    with pytest.raises(UnsupportedModelError, match=r"GPT9.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        get_model_class("GPT9ForCausalLM")
    hf = LlamaConfig(**SMALL, hidden_act="relu", architectures=["LlamaForCausalLM"])
    config = ModelConfig.from_dict(hf.to_dict())
    with pytest.raises(UnsupportedModelError, match=r"relu.*silu"):
        build_model(config, dtype=torch.float32)
    register_model("ToyForCausalLM", "xllm_models.llama:LlamaForCausalLM")
    assert get_model_class("ToyForCausalLM") is get_model_class("LlamaForCausalLM")
