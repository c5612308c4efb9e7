"""Greedy tokens of whole engines and of a server on the emulated NPU: in float32 the same as on the CPU platform.

The device's fused attention takes no float32. The reference lets it through here (NPU_LAB_FLOAT32), so that tokens can
be compared one by one; half precision is test_operators.py's. Triton kernels run there as native code that is made of
the linalg which goes to the NPU's compiler.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import openai
import pytest
from npu_emulator import dispatch
from xllm_models.attention.npu_attention import NpuAttention
from xllm_models.hub import resolve_model

from tests.support.engine import run_engine
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.npu_lab
NEW_TOKENS = 16
CHUNKS = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64}
SMALL = {"max_cache_size": 26 * 8192, "max_model_len": 256, "prefill_scheduling_memory_usage_threshold": 1.0}
WAYS = {
    "chunks, prefix cache, overlap": CHUNKS,
    "all off": {"enable_prefix_cache": False, "enable_chunked_prefill": False, "max_tokens_per_batch": 1024,
                "enable_schedule_overlap": False},
    "preemption": {**CHUNKS, **SMALL},
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 60).tolist()
    return ([rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, 140, 8)]
            + [shared + rng.integers(0, 256, int(n)).tolist() for n in (1, 9, 30)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """architecture -> (its directory, what the CPU platform answers)"""

    @cache
    def make(name: str) -> tuple[Path, list[list[int]]]:
        extra = {"sliding_window": 24} if name == "mistral" else {}
        directory = make_tiny_model(tmp_path_factory.mktemp("models") / name, name, **extra)
        return directory, run_engine(directory, prompts(), NEW_TOKENS, platform="cpu", **CHUNKS)[0]

    return make


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused attention takes it, here and in processes that the test starts."""
    monkeypatch.setenv("NPU_LAB_FLOAT32", "1")
    monkeypatch.setattr(NpuAttention, "dtypes", frozenset())


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.slow), "npu", "triton"])
def attention(request: pytest.FixtureRequest, float32: None) -> str:
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_as_on_the_cpu(model, attention: str, way: str) -> None:
    directory, expected = model("llama")
    dispatch.calls.clear()
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, platform="npu", attention_backend=attention,
                               **WAYS[way])
    assert answers == expected
    assert loop.scheduler.stats.preemptions_total > 0 or way != "preemption"
    assert loop.scheduler.stats.prefix_hits_total > 0 or way == "all off"
    assert (dispatch.calls["npu::npu_fused_infer_attention_score_v2"] > 0) == (attention == "npu")
    assert (dispatch.calls["triton::paged_decode_kernel"] > 0) == (attention == "triton")
    assert all(dispatch.calls[f"npu::npu_{name}"] for name in ("rms_norm", "add_rms_norm", "rotary_mul", "swiglu"))


@pytest.mark.parametrize(("dtype", "fused"), [("float16", True), ("bfloat16", True), ("float32", False)])
def test_half_precision_takes_the_fused_attention(model, dtype: str, fused: bool) -> None:
    dispatch.calls.clear()
    answers, _ = run_engine(model("llama")[0], prompts(), NEW_TOKENS, platform="npu", dtype=dtype, **CHUNKS)
    assert all(answers)
    assert (dispatch.calls["npu::npu_fused_infer_attention_score_v2"] > 0) == fused


@pytest.mark.parametrize("architecture", ["mistral", "qwen3_moe", "deepseek_v3"])
def test_architectures(model, attention: str, architecture: str) -> None:
    directory, expected = model(architecture)
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, platform="npu", attention_backend=attention, **CHUNKS)
    assert answers == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_devices(model, float32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model("llama")
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, platform="npu", attention_backend="npu", tp_size=2,
                            **CHUNKS)
    assert answers == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_experts_on_two_devices(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model("qwen3_moe")
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, platform="npu", tp_size=2, ep_size=2, **CHUNKS)
    assert answers == expected


@pytest.mark.multiprocess
def test_a_server_answers_a_client(model, attention: str, tmp_path: Path) -> None:
    directory, expected = model("llama")
    flags = ("--platform", "npu", "--attention-backend", attention, "--dtype", "float32")
    with (ServerProcess(directory, tmp_path, *flags) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client):
        for prompt, tokens in list(zip(prompts(), expected))[-3:]:
            answer = client.completions.create(
                model=directory.name, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
                extra_body={"return_token_ids": True})
            assert answer.choices[0].model_extra["token_ids"] == tokens


@pytest.mark.slow
@pytest.mark.model
def test_smollm2(float32: None) -> None:
    """Real weights and lengths of several blocks of 128."""
    directory = resolve_model("smollm2").path
    rng = np.random.default_rng(5)
    asked = [rng.integers(0, 49152, n).tolist() for n in (3, 150, 300)]
    options = {"max_cache_size": "64MiB", "block_size": 128, "max_model_len": 512}
    expected, _ = run_engine(directory, asked, 8, platform="cpu", **options)
    for attention in ("npu", "triton"):
        answers, _ = run_engine(directory, asked, 8, platform="npu", attention_backend=attention, **options)
        assert answers == expected, attention
