"""Engines whose weights are in virtual memory, on the CPU with real pages: tokens, and what sleeps and wakes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from xllm_models.hub import resolve_model
from xllm_models.llama import LlamaForCausalLM

from tests.support.engine import run_engine
from tests.support.hf_model import make_hf_model
from tests.support.sleeping import KINDS, SMALL, answer, engine_of, opened, prompts, resume, suspend
from tests.support.tiny_model import make_tiny_model
from xllm_npu.execution.engine import SleepUnavailable
from xllm_npu.execution.executor import Executor
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.warm_up import warm_up_step
from xllm_npu.memory.coordinator import SleepFailed
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[list[int]]:
    return run_engine(tiny_dir, prompts(), 40, **SMALL)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_without_virtual_memory_before_and_after_sleep(tiny_dir, expected, kind):
    with opened(tiny_dir, **KINDS[kind]) as loop:
        assert answer(loop, prompts()) == expected
        before = engine_of(loop).weights_hash()
        for level in (1, 2, 1):
            assert suspend(loop, level) > 400_000
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts()) == expected


def test_rule_8_sleep_needs_weights_in_virtual_memory(tiny_dir):
    with opened(tiny_dir, enable_vmm_kvcache=True, vmm_elastic=True, phy_page_granularity_size=16384) as loop:
        for action in (lambda e: e.sleep(1), lambda e: e.wake(), lambda e: e.weights_hash()):
            with pytest.raises(SleepUnavailable, match="--enable-vmm-weights"):
                action(engine_of(loop))


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3_moe": EXPERTS, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64}, "deepseek_v3": {},
    "gpt_oss": {"num_local_experts": 8}, "gemma3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_latents_sinks_and_tied_embeddings_right_after_waking(tmp_path, family):
    """Everything that is derived from weights: latent projections, sinks, rotary tables, norms in float32."""
    model = make_tiny_model(tmp_path / "m", family, **FAMILIES[family])
    expected = run_engine(model, prompts(), 24, **SMALL)[0]
    with opened(model, **KINDS["elastic"]) as loop:
        for level in (1, 2):
            before = engine_of(loop).weights_hash()
            suspend(loop, level)
            resume(loop)
            assert answer(loop, prompts(), 24) == expected
            assert engine_of(loop).weights_hash() == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_and_dummy_weights(tiny_dir, dtype):
    """float16 is computed in float32 on a CPU, from weights that were rounded after loading."""
    with opened(tiny_dir, **KINDS["elastic"], **{"dtype": dtype, "load_format": "dummy"}) as loop:
        before, expected = engine_of(loop).weights_hash(), answer(loop, prompts())
        for level in (1, 2):
            suspend(loop, level)
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts()) == expected


@pytest.mark.slow
def test_compiled_decode_steps_find_their_weights(tiny_dir):
    with opened(tiny_dir, **KINDS["elastic"], enable_graph=True, graph_batch_sizes=(1, 4)) as loop:
        expected = answer(loop, prompts())
        suspend(loop, 1)
        resume(loop)
        assert answer(loop, prompts()) == expected
        assert loop.scheduler.stats.graph_misses_total == 0


def rewrite(directory: Path, seed: int) -> None:
    """Other weights of the same shapes in the same files."""
    make_tiny_model(directory, seed=seed)


def test_files_that_have_changed_are_refused_by_level_1_and_taken_by_level_2(tmp_path):
    model = make_tiny_model(tmp_path / "m")
    with opened(model, **KINDS["elastic"]) as loop:
        engine, expected = engine_of(loop), answer(loop, prompts())
        before = engine.weights_hash()
        suspend(loop, 1)
        rewrite(model, seed=1)
        with pytest.raises(PageGrowthRefused, match="files have changed"):
            engine.wake()
        with pytest.raises(RuntimeError, match="asleep"):
            engine.weights_hash()
        rewrite(model, seed=0)
        resume(loop)
        assert engine.weights_hash() == before
        suspend(loop, 2)
        rewrite(model, seed=1)
        resume(loop)
        assert engine.weights_hash() != before
        assert answer(loop, prompts()) != expected


def test_files_that_are_gone_make_no_sleep_and_no_wake_up(tmp_path):
    model = make_tiny_model(tmp_path / "m")
    file, away = model / "model.safetensors", tmp_path / "away"
    with opened(model, **KINDS["elastic"]) as loop:
        expected = answer(loop, prompts())
        for level in (1, 2):
            file.rename(away)
            with pytest.raises(SleepFailed, match="safetensors"):
                suspend(loop, level)
            loop.scheduler.running.blocks.pool.pages.thaw()
            assert answer(loop, prompts()) == expected
            away.rename(file)
        suspend(loop, 2)
        file.rename(away)
        with pytest.raises(PageGrowthRefused, match=r"Waking up failed: .*safetensors"):
            engine_of(loop).wake()
        away.rename(file)
        resume(loop)
        assert answer(loop, prompts()) == expected


def resident(kind: str) -> int:
    return getattr(psutil.Process().memory_info(), kind)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["elastic", "fixed"])
def test_resident_bytes_fall_by_what_weights_and_kv_cache_take(tmp_path, kind, level):
    """Of this process, by what the system says. Done when 1: 95 percent."""
    model = make_tiny_model(tmp_path / "m", hidden=512, layers=4)
    size = (model / "model.safetensors").stat().st_size
    assert size > 30 * 2**20
    with opened(model, **{**KINDS[kind], "phy_page_granularity_size": 65536, "max_cache_size": "64MiB"}) as loop:
        answer(loop, prompts())
        cache = loop.ready.kv_cache_bytes if kind == "fixed" else 0
        before = resident("rss")
        freed = suspend(loop, level)
        assert before - resident("rss") >= 0.95 * (size + cache)
        assert 0.95 * (size + cache) <= freed <= 1.1 * (size + cache)
        resume(loop)
        assert resident("rss") - before < 0.05 * size


def test_fifty_cycles_are_bit_exact_and_nothing_grows(tmp_path):
    model = make_tiny_model(tmp_path / "m", hidden=256, layers=4)
    asked = prompts(2)
    with opened(model, **{**KINDS["elastic"], "phy_page_granularity_size": 65536}) as loop:
        before, expected = engine_of(loop).weights_hash(), answer(loop, asked, 8)
        sizes = []
        for cycle in range(50):
            suspend(loop, 1 + cycle % 2)
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            if cycle % 10 == 9:
                assert answer(loop, asked, 8) == expected
                sizes.append((resident("rss"), resident("shared"), len(os.listdir("/proc/self/fd")),
                              threading.active_count()))
        first, last = sizes[0], sizes[-1]
        assert last[0] - first[0] < 2**20
        assert last[1] - first[1] < 2**20
        assert last[2:] == first[2:]


# Names that are the modules'; windows; experts that transformers fuses; sinks; transposed matrices and tied embeddings;
# tied embeddings; keys and values of different widths.
HF = ["olmo2", "olmoe", "mimo_v2_flash", "gpt2",
      *(pytest.param(name, marks=pytest.mark.slow) for name in ("exaone4", "cohere2", "youtu"))]


@pytest.mark.parametrize("model_type", HF)
def test_models_through_transformers_code_sleep_too(tmp_path, model_type):
    model = make_hf_model(tmp_path / "m", model_type)
    settings = {**KINDS["elastic"], "model_impl": "transformers", "max_cache_size": "64MiB"}
    expected = run_engine(model, prompts(), 16, **SMALL, model_impl="transformers")[0]
    with opened(model, **settings) as loop:
        assert loop.ready.implementation == "transformers"
        assert answer(loop, prompts(), 16) == expected
        before = engine_of(loop).weights_hash()
        for level in (1, 2):
            suspend(loop, level)
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts(), 16) == expected


def test_what_is_copied_from_weights_follows_new_files(tmp_path, monkeypatch):
    """Sinks in float32 of a model in bfloat16, which is too coarse for the trial that such models have to pass."""
    monkeypatch.setattr("xllm_models.transformers_model.run_trial", lambda model, backend: "")
    model = make_tiny_model(tmp_path / "m", "gpt_oss", num_local_experts=8)
    options = {"model_impl": "transformers", "dtype": "bfloat16"}
    before = run_engine(model, prompts(), 16, **SMALL, **options)[0]
    with opened(model, **{**KINDS["elastic"], **options}) as loop:
        suspend(loop, 2)
        make_tiny_model(tmp_path / "m", "gpt_oss", seed=1, num_local_experts=8)
        resume(loop)
        after = run_engine(model, prompts(), 16, **SMALL, **options)[0]
        assert after != before
        assert answer(loop, prompts(), 16) == after


class Straying(LlamaForCausalLM):
    """An architecture that does not know the hook."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.extra = torch.nn.Parameter(torch.zeros(3))


def test_weights_that_would_not_sleep_are_refused_at_start(tiny_dir, monkeypatch):
    monkeypatch.setattr("xllm_models.registry.get_model_class", lambda name: Straying)
    monkeypatch.setattr(Straying, "placements", LlamaForCausalLM.placements)
    with pytest.raises(LoadError, match="keeps extra and 0 other tensors outside"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **KINDS["elastic"])


def test_weights_without_room_name_what_to_change(tiny_dir):
    with pytest.raises(LoadError, match=r"weights take .* bytes .*max_cache_size"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **KINDS["elastic"], **{"max_cache_size": "128KiB"})


def test_rule_22_one_ceiling_for_weights_and_kv_cache(tiny_dir):
    """With room for the weights and a third of a megabyte, the cache has that third."""
    layout_bytes = 450_000
    with opened(tiny_dir, **KINDS["elastic"], **{"max_cache_size": layout_bytes + 350_000}) as loop:
        pool = loop.scheduler.running.blocks.pool
        stats, layout = pool.page_stats(), pool.layout
        assert (stats.mapped + stats.free) * layout.total_page_bytes <= 350_000
        assert answer(loop, prompts())


def test_steps_keep_the_lock_that_a_sleep_waits_for(tiny_dir, made, monkeypatch):
    held: list[bool] = []
    run = Executor.run

    def look(self, *arguments):
        held.append(made[0].residency.stepping.locked())
        return run(self, *arguments)

    with opened(tiny_dir, **KINDS["elastic"]) as loop:
        monkeypatch.setattr(Executor, "run", look)
        answer(loop, prompts(2), 4)
        assert held
        assert all(held)
        assert not made[0].residency.stepping.locked()


def test_a_step_of_an_engine_that_sleeps_is_an_error_and_no_crash(tiny_dir):
    with opened(tiny_dir, **KINDS["fixed"]) as loop:
        for tags in ((), ("weights",)):
            suspend(loop, 2)
            engine_of(loop).wake(tags)
            with pytest.raises(RuntimeError, match="sleeps"):
                engine_of(loop).send(warm_up_step(True, 0, 1, 1))
        resume(loop)


@pytest.fixture
def made(monkeypatch) -> list[WorkerMemoryResources]:
    """All that engines of the test make, in order."""
    found: list[WorkerMemoryResources] = []
    init = WorkerMemoryResources.__init__

    def record(self, *arguments, **options):
        init(self, *arguments, **options)
        found.append(self)

    monkeypatch.setattr(WorkerMemoryResources, "__init__", record)
    return found


@pytest.mark.parametrize("kind", [*KINDS, "cache only", "none"])
def test_rules_5_6_7_and_20_who_uses_pages_is_who_was_asked_to(tiny_dir, made, kind):
    settings = {"cache only": {"enable_vmm_kvcache": True, "phy_page_granularity_size": 16384}, "none": {}, **KINDS}
    with opened(tiny_dir, **settings[kind]) as loop:
        cache = kind in ("elastic", "fixed", "cache only")
        weights = kind in KINDS
        assert len(made) == (cache or weights), "one pool for both"
        assert [(one.weights is not None, one.has_kv) for one in made] == [(weights, cache)] * len(made)
        assert loop.ready.elastic_kv_cache == (kind == "elastic")
        for one in made:
            one.check_integrity()


def test_rules_5_and_30_weights_alone_leave_the_physical_cache_as_it_is(tiny_dir):
    with opened(tiny_dir) as plain, opened(tiny_dir, **KINDS["weights only"]) as loop:
        assert loop.ready.num_kv_blocks == plain.ready.num_kv_blocks
        assert loop.ready.kv_cache_bytes == plain.ready.kv_cache_bytes


def test_rule_50_weights_are_reserved_first(tiny_dir, monkeypatch):
    opened_first: list[str] = []
    weights, cache = WorkerMemoryResources.open_weights, WorkerMemoryResources.open_kv
    monkeypatch.setattr(WorkerMemoryResources, "open_weights",
                        lambda *arguments: opened_first.append("weights") or weights(*arguments))
    monkeypatch.setattr(WorkerMemoryResources, "open_kv",
                        lambda *arguments: opened_first.append("cache") or cache(*arguments))
    run_engine(tiny_dir, [[40]], 2, **SMALL, **KINDS["elastic"])
    assert opened_first == ["weights", "cache"]


def test_nothing_is_left_of_an_engine_that_was_closed_asleep(tiny_dir):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("xllm-npu-pages")

    before = mapped()
    with opened(tiny_dir, **KINDS["elastic"]) as loop:
        assert mapped() > before
        suspend(loop, 1)
    assert mapped() == before


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_gives_back_what_it_takes_and_comes_back_bit_exact():
    """SmolLM2 in float32, half a gigabyte of weights."""
    model = resolve_model("smollm2").path
    asked = [list(range(100, 140)), list(range(500, 700)), [5, 6, 7]]
    sizes = {"max_cache_size": "1200MiB", "max_model_len": 1024, "block_size": 128,
             "phy_page_granularity_size": 2 * 2**20}
    expected = run_engine(model, asked, 16, **{**SMALL, **sizes, "max_cache_size": "200MiB"})[0]
    with opened(model, **{**KINDS["elastic"], **sizes}) as loop:
        assert answer(loop, asked, 16) == expected
        before = engine_of(loop).weights_hash()
        for level in (1, 2):
            awake = resident("rss")
            freed = suspend(loop, level)
            assert freed > 500 * 2**20
            assert awake - resident("rss") > 0.99 * freed
            resume(loop)
            assert resident("rss") - awake < 0.01 * freed
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, asked, 16) == expected
