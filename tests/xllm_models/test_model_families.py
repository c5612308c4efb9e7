"""What only one family has: longrope's two sets of frequencies, MXFP4 experts, a text model inside a larger one."""

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Phi3Config,
    Phi3ForCausalLM,
    SiglipVisionConfig,
)
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors
from xllm_models.config import ModelConfig
from xllm_models.layers.rotary import RotaryTable
from xllm_models.weights import mxfp4

from tests.support.mxfp4_model import make_mxfp4_model, random_mxfp4
from tests.support.paged_model import PagedModel

TOLERANCE = 3e-4
VOCAB = 160
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
ORIGINAL = 32  # positions of the first set of frequencies


def tokens(count, seed=0):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def close(ours, expected, tolerance=TOLERANCE):
    assert expected.std() > 0.5
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


# Phi-3's longrope


def longrope(**more):
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    return {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, **factors, **more}


def phi3(directory, **rope):
    torch.manual_seed(0)
    config = Phi3Config(**SMALL, original_max_position_embeddings=ORIGINAL, rope_parameters=longrope(**rope))
    model = Phi3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("rope", [{}, {"factor": 2.0}, {"attention_factor": 1.3}], ids=str)
@pytest.mark.parametrize("limit", [ORIGINAL, 128])
def test_longrope_in_short_sequences(tmp_path, rope, limit):
    model, ids = phi3(tmp_path, **rope), tokens(ORIGINAL)
    paged = PagedModel(tmp_path)
    paged.model.reserve_positions(limit)
    assert paged.model.rotary_switch == (0 if limit == ORIGINAL else ORIGINAL)
    close(torch.cat([paged.logits([(0, ids[:20])])[0], paged.logits([(0, ids[20:])])[0]]), expected_logits(model, ids))


def test_longrope_in_long_sequences(tmp_path):
    """A prompt beyond the original length, and generation after it: transformers' own tokens."""
    model, ids = phi3(tmp_path), tokens(ORIGINAL + 5)
    paged = PagedModel(tmp_path)
    paged.second_rotation = True
    chunks = [paged.logits([(0, ids[:20])])[0], paged.logits([(0, ids[20:])])[0]]
    close(torch.cat(chunks), expected_logits(model, ids))
    generated = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None,
                               output_logits=True, return_dict_in_generate=True)
    new = generated.sequences[0, len(ids):].tolist()
    ours = [chunks[-1][-1:]] + [paged.logits([(0, [t])])[0] for t in new[:-1]]
    close(torch.cat(ours), torch.cat(generated.logits))


def test_longrope_lengths_and_spellings():
    base = Phi3Config(**SMALL, rope_parameters=longrope(), original_max_position_embeddings=ORIGINAL).to_dict()
    base["architectures"] = ["Phi3ForCausalLM"]
    config = ModelConfig.from_dict(base)
    assert config.max_context_length == 128
    scaling = {key: value for key, value in longrope().items() if key.endswith("_factor") and "partial" not in key}
    for name in ("longrope", "su", "yarn"):
        old = {k: v for k, v in base.items() if k != "rope_parameters"} | {
            "rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": {"type": name, **scaling}}
        assert ModelConfig.from_dict(old).rope == config.rope
    base["rope_parameters"]["short_factor"] = [1.0] * 3
    with pytest.raises(ValueError, match=r"rope_scaling.*3 numbers.*short_factor.*4 pairs"):
        ModelConfig.from_dict(base)


def test_longrope_tables_cannot_change_under_cached_keys():
    config = Phi3Config(**SMALL, rope_parameters=longrope(), original_max_position_embeddings=ORIGINAL).to_dict()
    rope = ModelConfig.from_dict(config | {"architectures": ["Phi3ForCausalLM"]}).rope
    table = RotaryTable(rope, 16, torch.device("cpu"), 128)
    table.limit(ORIGINAL)
    short = table.cos_sin.clone()
    table.reserve(ORIGINAL + 1)
    assert torch.equal(table.cos_sin[:ORIGINAL], short[:ORIGINAL])
    with pytest.raises(AssertionError):
        table.limit(ORIGINAL + 1)


# gpt-oss's MXFP4 experts


def test_mxfp4_numbers_are_transformers():
    blocks, _ = random_mxfp4(2, 3, 64)
    scales = torch.randint(0, 255, (2, 3, 2), dtype=torch.uint8)
    ours = mxfp4.unscaled(blocks).float() * mxfp4.factors(scales)
    assert torch.equal(ours, _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2))


@pytest.mark.parametrize("order", [("blocks", "scales"), ("scales", "blocks")], ids="-".join)
def test_mxfp4_checkpoints_give_transformers_logits(tmp_path, order):
    from xllm_models.weights.loader import load_weights
    from xllm_models.weights.source import open_source

    model, ids = make_mxfp4_model(tmp_path, order), tokens(40)
    paged = PagedModel(tmp_path)
    close(paged.logits([(0, ids)])[0], expected_logits(model, ids))
    paged.model.allocate_weights()
    load_weights(paged.model, open_source(tmp_path))
    close(paged.logits([(1, ids)])[0], expected_logits(model, ids))


def test_mxfp4_is_exact_in_bfloat16(tmp_path):
    model = make_mxfp4_model(tmp_path)
    experts = PagedModel(tmp_path, dtype=torch.bfloat16).model.layers[0].mlp.experts
    expected = model.model.layers[0].mlp.experts.gate_up_proj.data.transpose(1, 2)
    assert experts.gate_up.dtype == torch.bfloat16
    assert torch.equal(experts.gate_up.data.float(), torch.cat((expected[:, ::2], expected[:, 1::2]), dim=1))


# Gemma 3 with a vision tower


def test_the_text_part_of_a_gemma3_that_sees(tmp_path):
    torch.manual_seed(0)
    text = Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=12,
                            layer_types=["sliding_attention", "full_attention"])
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                image_size=28, patch_size=14)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)).eval()
    model.save_pretrained(tmp_path)
    ids = tokens(40)
    close(PagedModel(tmp_path).logits([(0, ids)])[0], expected_logits(model, ids))
