"""Which attention backend serves a model: the one asked for if it can, else the first that can, else a refusal."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from xllm_models.attention.cpu_attention import CpuAttention
from xllm_models.attention.cpu_mla import CpuMla
from xllm_models.attention.cuda_attention import CudaAttention
from xllm_models.attention.flashinfer_attention import FlashInferAttention
from xllm_models.attention.npu_attention import NpuAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_models.attention.torch_mla import TorchMla
from xllm_models.config import ModelConfig
from xllm_models.mla_config import MlaConfig

from xllm_npu.execution.load_plan import choose_attention, graph_sizes
from xllm_npu.execution.model_loader import LoadError

CONFIG = ModelConfig(
    architecture="Gemma2ForCausalLM", model_type="gemma2", vocab_size=8, hidden_size=8, intermediate_size=8,
    num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position_embeddings=8)


LATENT = dataclasses.replace(CONFIG, mla=MlaConfig(
    q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4))


def choose(asked, offered, *needs, config=CONFIG, dtype=torch.bfloat16):
    settings = SimpleNamespace(execution=SimpleNamespace(attention_backend=asked))
    platform = SimpleNamespace(name="some", capabilities=SimpleNamespace(attention_backends=offered))
    return choose_attention(settings, platform, config, frozenset(needs), dtype)


@pytest.mark.parametrize(("asked", "offered", "needs", "expected"), [
    ("auto", ("numba", "torch"), (), CpuAttention),
    ("auto", ("numba", "torch"), ("sinks", "softcap"), CpuAttention),
    ("auto", ("cuda", "torch"), (), CudaAttention),
    ("auto", ("cuda", "torch"), ("softcap",), TorchAttention),
    ("cuda", ("cuda", "torch"), (), CudaAttention),
    ("torch", ("npu", "torch"), ("sinks",), TorchAttention),
])
def test_the_first_that_can_is_taken(asked, offered, needs, expected):
    assert choose(asked, offered, *needs) is expected


def test_one_that_does_not_take_the_heads_is_passed_over():
    offered = ("flashinfer", "cuda", "torch")
    assert choose("auto", offered) is CudaAttention
    assert choose("auto", offered, config=dataclasses.replace(CONFIG, head_dim=128)) is FlashInferAttention
    with pytest.raises(LoadError, match=r"heads have 8 values.*flashinfer takes 64, 128, 256.*auto or to one of cuda"):
        choose("flashinfer", offered)


def test_one_that_does_not_compute_in_the_dtype_is_passed_over():
    assert choose("auto", ("npu", "torch")) is NpuAttention
    assert choose("auto", ("npu", "torch"), dtype=torch.float32) is TorchAttention
    with pytest.raises(LoadError, match=r"npu does not compute in float32: set --dtype to bfloat16 or float16.*torch"):
        choose("npu", ("npu", "torch"), dtype=torch.float32)
    with pytest.raises(LoadError, match=r"No attention backend of platform some \(npu\) computes in float32"):
        choose("auto", ("npu",), dtype=torch.float32)


@pytest.mark.parametrize(("asked", "offered", "needs", "message"), [
    ("npu", ("torch", "npu"), ("sinks",), r"has sinks, and attention backend npu.*to auto or to one of torch\."),
    ("auto", ("cuda",), ("sinks", "softcap"), r"has sinks and softcap, and no attention backend of platform some"),
    ("flash", ("cuda", "torch"), (), r"no attention backend flash.*cuda, torch"),
])
def test_what_cannot_be_is_refused_by_name(asked, offered, needs, message):
    with pytest.raises(LoadError, match=message):
        choose(asked, offered, *needs)


@pytest.mark.parametrize(("asked", "offered", "expected", "warned"), [
    ("auto", ("numba", "torch"), CpuMla, False),
    ("auto", ("npu", "torch"), TorchMla, False),
    ("auto", ("npu",), TorchMla, True),
    ("cuda", ("cuda", "torch"), TorchMla, True),
])
def test_latent_attention_falls_back_to_torch(caplog, asked, offered, expected, warned):
    assert choose(asked, offered, config=LATENT) is expected
    assert ("has no latent attention" in caplog.text) == warned


def test_latent_attention_that_cannot_be_captured_is_refused():
    settings = SimpleNamespace(execution=SimpleNamespace(enable_graph=True))
    platform = SimpleNamespace(name="some", capabilities=SimpleNamespace(graph="capture"))
    with pytest.raises(LoadError, match=r"attention backend TorchMla .*: turn enable_graph off"):
        graph_sizes(settings, platform, TorchMla, None)
