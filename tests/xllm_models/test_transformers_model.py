"""Networks of transformers on the paged cache: logits, loading, and what is refused with which words."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from xllm_models import transformers_model
from xllm_models.config import ModelConfigError
from xllm_models.registry import build_model, read_model_config
from xllm_models.transformers_attention import PagedRun, _is_causal
from xllm_models.transformers_model import TransformersRefusal
from xllm_models.weights.source import WeightError
from xllm_platform.parallel import Group, ParallelState

from tests.support.hf_model import ARCHITECTURES, MIXED, make_hf_model
from tests.support.paged_model import PagedModel
from tests.support.tiny_model import make_tiny_model

FIRST, SECOND = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 33)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @cache
    def make(model_type):
        return make_hf_model(tmp_path_factory.mktemp("models") / "m", model_type)

    return make


def paged(directory, **options):
    return PagedModel(directory, model_impl="transformers", attention=options.pop("attention", "torch"), **options)


def expected(directory, tokens, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager",
                                                 trust_remote_code=False).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def by_pieces(model):
    """Logits of both sequences: chunks, a batch of a chunk and a prompt, decodes together."""
    first = [*model.logits([(0, FIRST[:30])])]
    second = []
    for a, b in [(FIRST[30:60], SECOND[:23]), *(([FIRST[60 + i]], [SECOND[23 + i]]) for i in range(10))]:
        one, two = model.logits([(0, a), (1, b)])
        first.append(one)
        second.append(two)
    return torch.cat(first), torch.cat(second)


def check(directory, tolerance, dtype=torch.float32, **options):
    for found, tokens in zip(by_pieces(paged(directory, dtype=dtype, **options)), (FIRST, SECOND)):
        wanted = expected(directory, tokens)
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max() < tolerance


# The others are slow tests, as in tests/e2e/test_transformers_models.py, which compares tokens.
@pytest.mark.parametrize("model_type", [
    pytest.param(name, marks=() if name in ("gpt2", "cohere2", "mimo_v2_flash", "vaultgemma") else pytest.mark.slow)
    for name in ARCHITECTURES])
def test_logits_are_those_of_transformers(checkpoint, model_type):
    check(checkpoint(model_type), 1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "exaone4", "olmoe", "youtu"])
def test_the_cpu_backend_agrees(checkpoint, model_type):
    check(checkpoint(model_type), 1e-3, attention="numba")


@pytest.mark.parametrize("model_type", ["gpt2", "olmo2", "exaone4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_is_close(checkpoint, model_type, dtype):
    check(checkpoint(model_type), 0.1, dtype=dtype, attention="numba")


def test_windows_come_from_the_layers(checkpoint):
    assert paged(checkpoint("exaone4")).model.sliding_windows == (24, 0)
    assert paged(checkpoint("starcoder2")).model.sliding_windows == (24, 24)


# Loading

def rewrite(directory, target, change):
    """A copy of a checkpoint with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors", {"format": "pt"})
    return target


def test_names_without_the_prefix_of_the_body(checkpoint, tmp_path):
    """As the first GPT-2 files have them."""
    short = rewrite(checkpoint("gpt2"), tmp_path / "m",
                    lambda tensors: {n.removeprefix("transformer."): t for n, t in tensors.items()})
    found = by_pieces(paged(short))
    assert all(torch.equal(a, b) for a, b in zip(found, by_pieces(paged(checkpoint("gpt2")))))


@pytest.mark.parametrize("twice", [False, True])
def test_tied_embeddings(tmp_path, twice):
    directory = make_hf_model(tmp_path / "m", "olmo2", tie_word_embeddings=True)
    if twice:
        directory = rewrite(directory, tmp_path / "twice", lambda tensors: {
            **tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    check(directory, 1e-3)


def test_missing_tensors_are_named(checkpoint, tmp_path):
    for model_type, name in (("gpt2", "transformer.h.1.attn.c_proj.weight"), ("olmoe", "model.norm.weight")):
        broken = rewrite(checkpoint(model_type), tmp_path / model_type,
                         lambda tensors, name=name: {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(WeightError, match=name.replace(".", r"\.")):
            paged(broken)


def test_code_beside_the_checkpoint_is_not_run(checkpoint, tmp_path):
    directory = rewrite(checkpoint("olmoe"), tmp_path / "m", lambda tensors: tensors)
    ran = tmp_path / "ran"
    for name in ("modeling_own", "configuration_own"):
        (directory / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (directory / "config.json").write_text(json.dumps(config))
    check(directory, 1e-3)
    assert not ran.exists()


def test_pickles_are_not_read(checkpoint, tmp_path):
    directory = rewrite(checkpoint("gpt2"), tmp_path / "m", lambda tensors: tensors)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(WeightError, match="pickle"):
        paged(directory)


# What runs where

def test_auto_prefers_a_native_network(checkpoint, tmp_path):
    llama = make_tiny_model(tmp_path / "llama")
    assert [read_model_config(llama, name).implementation for name in ("auto", "native", "transformers")] == [
        "native", "native", "transformers"]
    assert read_model_config(checkpoint("gpt2"), "auto").implementation == "transformers"
    check(llama, 1e-3)


def config_of(tmp_path: Path, **fields) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize(("fields", "says"), [
    ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
     "encoder-decoder"),
    ({"architectures": ["StrangeForCausalLM"], "model_type": "strange", "auto_map": {"AutoModel": "x.Y"}},
     "code that comes with the checkpoint"),
    ({"architectures": ["GPT9ForCausalLM"], "model_type": "gpt9"}, "GPT9ForCausalLM is not supported"),
    ({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 1, "layer_types": ["conv"]},
     "keep a state"),
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "keep a state"),
    ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "keep a state"),
    ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}},
     "quantized"),
])
def test_configurations_that_are_refused(tmp_path, fields, says):
    with pytest.raises(ModelConfigError, match=says):
        read_model_config(config_of(tmp_path, **fields), "auto")


@pytest.mark.parametrize(("model_type", "fields", "says"), [
    ("bloom", {}, "do not call transformers' attention interface"),
    ("falcon", {}, "do not call transformers' attention interface"),
    ("doge", {}, "bias of its own"),
    ("llama4_text", {"num_local_experts": 2, "attention_chunk_size": 64, "intermediate_size_mlp": 64},
     "neither causal nor a sliding window"),
    ("bert", {"is_decoder": False}, "looks ahead"),
    ("bart", {"decoder_layers": 2}, "something else than in one piece"),  # counts positions from its own cache
    ("rwkv", {}, "keep a state"),
])
def test_networks_that_are_refused(tmp_path, model_type, fields, says):
    directory = make_hf_model(tmp_path / "m", model_type, **fields)
    with pytest.raises(TransformersRefusal, match=says):
        paged(directory)


def test_one_device_only(checkpoint):
    pair = Group((0, 1), 0)
    two = ParallelState(world=pair, tp=pair, dp=Group((0,), 0), ep=Group((0,), 0), moe_tp=pair)
    with pytest.raises(TransformersRefusal, match="--tp_size 1"):
        build_model(read_model_config(checkpoint("gpt2")), dtype=torch.float32, parallel=two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_trial_finds_state_beside_the_cache(checkpoint, monkeypatch, dtype):
    """A layer that looks at the token before, as a convolution does."""
    forward = GPT2MLP.forward

    def shifted(self, hidden):
        return forward(self, hidden + 0.5 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(GPT2MLP, "forward", shifted)
    with pytest.raises(TransformersRefusal, match="something else"):
        paged(checkpoint("gpt2"), dtype=dtype)


def test_the_trial_finds_positions_counted_elsewhere(tmp_path):
    directory = make_hf_model(tmp_path / "m", "bart", decoder_layers=2)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TransformersRefusal, match="something else"):
            paged(directory, dtype=dtype)


def test_the_trial_finds_a_wrong_attention(checkpoint, monkeypatch):
    """A layer that sees one key less, as a mistake in windows would have it."""
    layer = transformers_model._layer

    def shortsighted(index, call):
        return layer(index, call) if index else type(layer(index, call))(index, call.scale, 5)

    monkeypatch.setattr(transformers_model, "_layer", shortsighted)
    with pytest.raises(TransformersRefusal, match="something else"):
        paged(checkpoint("gpt2"))


def test_the_trial_finds_a_cache_that_is_not_written(checkpoint, monkeypatch):
    attend = PagedRun.attend
    monkeypatch.setattr(PagedRun, "attend", lambda self, q, k, v: attend(self, q, k, v * 1.01))
    with pytest.raises(TransformersRefusal, match="something else"):
        paged(checkpoint("gpt2"))


def test_patterns_of_masks():
    sliding, chunked = sliding_window_causal_mask_function, chunked_causal_mask_function
    assert _is_causal(sliding(24), 24)
    assert _is_causal(sliding(9000), 9000)
    assert not _is_causal(sliding(24), 25)
    assert not _is_causal(sliding(24), 0)
    assert not _is_causal(chunked(64, torch.zeros(1, dtype=torch.int64)), 64)


@pytest.mark.parametrize(("rope", "longest"), [
    ({"rope_type": "default"}, 512),
    ({"rope_type": "linear", "factor": 4.0}, 2048),
    ({"rope_type": "dynamic", "factor": 4.0}, 512),  # frequencies would depend on the longest of a batch
    ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128,
      "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
])
def test_contexts_end_where_frequencies_would_switch(tmp_path, rope, longest):
    directory = config_of(
        tmp_path, architectures=["Olmo2ForCausalLM"], model_type="olmo2", hidden_size=64, num_attention_heads=4,
        num_hidden_layers=2, vocab_size=260, max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **rope})
    assert read_model_config(directory).max_context_length == longest


def test_mixed_windows_are_checked_here():
    assert MIXED["sliding_window"] < len(SECOND), "the sequences must be longer than the windows"
