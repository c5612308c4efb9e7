"""Models that sleep and wake with requests open, over real engine processes and real pages of the CPU's memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import psutil
import pytest

from tests.support.master import Answer, metric, prompt_of, running_master, until
from tests.support.server import ENGINE, WORKER
from tests.support.tiny_model import make_tiny_model
from xllm_npu.llm import LLM
from xllm_npu.master.llm_master import EngineStatus, LLMMaster, ModelSleeping
from xllm_npu.master.residency_error import ResidencyError
from xllm_npu.state.sampling_params import SamplingParams

pytestmark = pytest.mark.multiprocess

WEIGHTS = {"enable_vmm_weights": True, "phy_page_granularity_size": 16384}
ELASTIC = {**WEIGHTS, "enable_vmm_kvcache": True, "vmm_elastic": True}
KINDS = {"elastic": ELASTIC, "fixed": {**WEIGHTS, "enable_vmm_kvcache": True},
         "weights only": {**WEIGHTS, "vmm_elastic": True}}
EACH_KIND = ["elastic", pytest.param("fixed", marks=pytest.mark.slow),
             pytest.param("weights only", marks=pytest.mark.slow)]
CROWDED = {"max_seqs_per_batch": 4, "max_tokens_per_batch": 64}  # prompts in pieces, and requests that wait
PROMPTS = [*(prompt_of(40 + 30 * i, i) for i in range(5)), prompt_of(8000, 9)]
LONG = len(PROMPTS) - 1
TOKENS = 40


def processes(module: str) -> list[psutil.Process]:
    """Of engines that this process started itself; servers of other tests may run beside them."""
    engines = [p for p in psutil.Process().children() if _runs(p, ENGINE)]
    children = [child for engine in engines for child in engine.children(recursive=True)]
    return [p for p in engines + children if _runs(p, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE and module in process.cmdline()


async def undisturbed(master: LLMMaster) -> list[list[int]]:
    answers = [Answer(master, p, TOKENS) for p in PROMPTS]
    return [await a.whole() for a in answers]


async def in_the_middle(master: LLMMaster) -> list[Answer]:
    """All are open: the long prompt is computed in pieces, which fill the steps, and others wait."""
    salt = str(metric(master, "prompt_tokens_total", engine="0"))  # no prefix is known
    answers = [Answer(master, p, TOKENS, salt) for p in (PROMPTS[LONG], *PROMPTS[:LONG])]
    await until(lambda: metric(master, "num_requests_running", engine="0") > 0, "a piece of a prompt")
    return [*answers[1:], answers[0]]


async def idle(master: LLMMaster, engines: int = 1) -> None:
    """Nothing is left of any request."""
    for engine in map(str, range(engines)):
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            await until(lambda name=name, engine=engine: metric(master, name, engine=engine) == 0, name)


@pytest.mark.parametrize("kind", EACH_KIND)
async def test_kept_requests_go_on(tiny_dir, kind):
    async with running_master(tiny_dir, **CROWDED, **KINDS[kind]) as master:
        expected = await undisturbed(master)
        for level in (1, 2):
            answers = await in_the_middle(master)
            assert answers[LONG].count == 0, "the long prompt is not in the making"
            await master.sleep(level, "keep")
            assert (master.status, master.residency.state, master.residency.level) == (
                EngineStatus.SLEEPING, "sleeping", level)
            assert master.residency.freed_bytes > 400_000
            assert master.check_health()
            with pytest.raises(ModelSleeping, match="tiny"):
                Answer(master, PROMPTS[0], 1)
            state = ("weights_offloaded", "discard_all")[level - 1]
            assert metric(master, "engine_sleep_state", sleep_state=state) == 1
            assert metric(master, "num_requests_running", engine="0") == 0
            assert not any(a.done for a in answers)
            if level == 2:
                await master.sleep(2, "keep")
                await master.wake(["weights"])
                assert (master.status, master.residency.tags) == (EngineStatus.SLEEPING, ("weights",))
                await master.wake(["kv_cache"])
            else:
                await master.wake()
            assert (master.status, master.residency.state) == (EngineStatus.READY, "awake")
            await master.wake()
            assert [await a.whole() for a in answers] == expected
        await idle(master)
        if kind == "elastic":
            await until(lambda: metric(master, "kv_cache_pages", engine="0", state="mapped") == 1, "the pinned page")


@pytest.mark.parametrize("kind", EACH_KIND)
@pytest.mark.slow
async def test_rule_57_virtual_memory_info(tiny_dir, kind):
    async with running_master(tiny_dir, **KINDS[kind], dp_size=2) as master:
        def owner(name: str) -> dict[str, int]:
            return master.virtual_memory_info()["owners"][name]

        info = master.virtual_memory_info()
        assert info["residency"] == {"state": "awake", "level": 0, "tags": ["weights", "kv_cache"]}
        assert info["growth_refusals"] == {}
        assert set(info["owners"]) == ({"weights"} if kind == "weights only" else {"weights", "kv_cache"})
        assert info["bytes"] == sum(o["bytes"] for o in info["owners"].values())
        weights = dict(owner("weights"))
        assert weights["bytes"] == weights["mapped"] * 16384 >= master.info.weight_bytes
        assert (weights["free"], weights["pinned"], weights["reserved"]) == (0, weights["mapped"], 0)
        at_rest = {name: dict(owner(name)) for name in info["owners"]}
        answers = [Answer(master, p, 300) for p in PROMPTS]
        await asyncio.gather(*(a.begun() for a in answers))
        if kind == "elastic":  # a page of each region of each of two layers: K and V
            assert at_rest["kv_cache"]["mapped"] == at_rest["kv_cache"]["pinned"] == 2 * 4

            def pages() -> float:
                return sum(metric(master, "kv_cache_pages", engine=e, state="mapped") for e in "01")

            await until(lambda: owner("kv_cache")["mapped"] == 4 * pages() > 8, "the pages that the allocators have")
            assert (owner("kv_cache")["mapped"] + owner("kv_cache")["free"]
                    == at_rest["kv_cache"]["mapped"] + at_rest["kv_cache"]["free"])
        elif kind == "fixed":
            assert owner("kv_cache") == at_rest["kv_cache"]
            assert owner("kv_cache")["bytes"] >= master.info.kv_cache_bytes
        assert metric(master, "virtual_memory_bytes", engine="1", owner="weights") == weights["bytes"] / 2
        await master.sleep(2, "keep")
        info = master.virtual_memory_info()
        assert info["residency"] == {"state": "sleeping", "level": 2, "tags": []}
        assert info["bytes"] == 0
        assert all(o["mapped"] == 0 and o["free"] > 0 for o in info["owners"].values())
        await master.wake(["weights"])
        assert owner("weights") == weights
        await master.wake()
        await asyncio.gather(*(a.whole() for a in answers))
        await idle(master, 2)
        await until(lambda: {name: owner(name) for name in info["owners"]} == at_rest, "what is there at rest")


@pytest.mark.slow
async def test_who_leaves_and_who_is_ended(tiny_dir):
    async with running_master(tiny_dir, **CROWDED, **ELASTIC) as master:
        expected = await undisturbed(master)
        answers = await in_the_middle(master)
        sleeping = asyncio.create_task(master.sleep(1, "keep"))
        await answers[LONG].leave()  # while it goes to sleep
        await sleeping
        await answers[0].leave()  # while it sleeps
        waking = asyncio.create_task(master.wake())
        await answers[1].leave()  # while it wakes
        deeper = asyncio.create_task(master.sleep(2, "keep"))  # which arrives then
        await asyncio.gather(waking, deeper)
        assert (master.residency.state, master.residency.level) == ("sleeping", 2)
        await master.wake()
        assert [await a.whole() for a in answers[2:LONG]] == expected[2:LONG]
        await idle(master)

        answers = await in_the_middle(master)
        await master.sleep(1, "wait")
        assert [await a.whole() for a in answers] == expected
        await master.wake()

        answers = await in_the_middle(master)
        await master.sleep()
        for answer, whole in zip(answers, expected):
            tokens = await answer.whole()
            assert tokens == whole[: len(tokens)]
            assert answer.reasons[0] == "abort"
        await master.wake()
        assert await undisturbed(master) == expected
        await idle(master)
        assert metric(master, "residency_transition_seconds_count", transition="wake") == 4


@pytest.mark.slow
async def test_a_prefix_from_before_the_sleep_is_not_found(tiny_dir):
    async with running_master(tiny_dir, **WEIGHTS, enable_vmm_kvcache=True) as master:
        expected = await Answer(master, PROMPTS[4], 5).whole()
        again = Answer(master, PROMPTS[4], 5)
        await again.whole()
        assert again.last is not None
        assert again.last.num_cached_tokens > 0
        for level in (1, 2):
            await master.sleep(level)
            await master.wake()
            after = Answer(master, PROMPTS[4], 5)
            assert await after.whole() == expected
            assert after.last is not None
            assert after.last.num_cached_tokens == 0


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("experts") / "m", "qwen3_moe", max_position_embeddings=2048)


@pytest.mark.parametrize(("model", "layout", "children"), [
    pytest.param("tiny_dir", {"dp_size": 2}, (2, 0), marks=pytest.mark.slow), ("tiny_dir", {"tp_size": 2}, (1, 1)),
    pytest.param("experts_dir", {"dp_size": 2}, (2, 0), marks=pytest.mark.slow),
    pytest.param("experts_dir", {"dp_size": 2, "tp_size": 2}, (2, 2), marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_all_ranks_sleep(request, model, layout, children):
    """Experts are shared: those ranks run every step together."""
    options = {**CROWDED, **ELASTIC, **layout, "max_cache_size": "200MiB"}
    async with running_master(request.getfixturevalue(model), **options) as master:
        assert master.info is not None
        assert master.info.steps_together == (model == "experts_dir")
        assert (len(processes(ENGINE)), len(processes(WORKER))) == children
        expected = await undisturbed(master)
        for level in (1, 2):
            answers = [Answer(master, p, TOKENS) for p in PROMPTS]
            await answers[0].begun()
            await master.sleep(level, "keep")
            for engine in range(children[0]):
                assert metric(master, "kv_cache_pages", engine=str(engine), state="mapped") == 1
            await master.wake()
            assert [await a.whole() for a in answers] == expected
        await idle(master, children[0])


@pytest.mark.parametrize(("module", "layout"), [
    pytest.param(ENGINE, {}, marks=pytest.mark.slow), (WORKER, {"tp_size": 2})])
@pytest.mark.slow
async def test_a_death_while_it_sleeps(tiny_dir, module, layout):
    async with running_master(tiny_dir, **ELASTIC, **layout) as master:
        kept = Answer(master, PROMPTS[0], 2000)
        await kept.begun()
        await master.sleep(1, "keep")
        processes(module)[0].send_signal(signal.SIGKILL)
        await until(lambda: master.status is EngineStatus.DEAD, "the death")
        await kept.whole()
        assert kept.last is not None
        assert "SIGKILL" in (kept.last.error or "")
        assert not master.check_health()
        for call in (master.wake(), master.sleep(2)):
            with pytest.raises(ResidencyError) as gone:
                await call
            assert gone.value.code in ("gone", "not_ready")


@pytest.mark.slow
async def test_the_end_of_a_server_that_sleeps(tiny_dir):
    async with running_master(tiny_dir, **ELASTIC, tp_size=2) as master:
        kept = Answer(master, PROMPTS[0], 2000)
        await kept.begun()
        await master.sleep(1, "keep")
        waking = asyncio.create_task(master.wake())
        await asyncio.sleep(0)
    assert "shutting down" in (kept.last.error if kept.last is not None and kept.last.error else "")
    await asyncio.gather(waking, return_exceptions=True)
    await until(lambda: not processes(ENGINE) and not processes(WORKER), "the end of all processes", 15.0)


@pytest.mark.parametrize(("model", "layout", "seed"), [
    ("tiny_dir", {}, 1), pytest.param("tiny_dir", {"tp_size": 2}, 2, marks=pytest.mark.slow),
    pytest.param("tiny_dir", {}, 3, marks=pytest.mark.slow),
    pytest.param("experts_dir", {"dp_size": 2}, 4, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_any_order(request, model, layout, seed):
    """Requests, clients that leave, pauses, sleep and wake-up, as they come; whoever stays gets its tokens."""
    rng = random.Random(seed)
    options = {**CROWDED, **ELASTIC, **layout, "max_cache_size": "200MiB"}
    async with running_master(request.getfixturevalue(model), **options) as master:
        expected = await undisturbed(master)
        answers: list[tuple[int, Answer]] = []
        left: list[Answer] = []
        calls: list[asyncio.Task] = []
        for turn in range(40):
            if rng.random() < 0.5:
                calls.append(asyncio.create_task(rng.choice((
                    lambda: master.sleep(rng.choice((1, 2)), rng.choice(("keep", "keep", "wait"))),
                    lambda: master.pause(rng.choice(("keep", "wait"))), master.resume,
                    master.wake, lambda: master.wake([rng.choice(("weights", "kv_cache"))])))()))
            if rng.random() < 0.7 and master.status is EngineStatus.READY:
                which = rng.randrange(len(PROMPTS))
                answers.append((which, Answer(master, PROMPTS[which], TOKENS, rng.choice(("", str(turn))))))
            if answers and rng.random() < 0.15:
                which, answer = answers.pop(rng.randrange(len(answers)))
                left.append(answer)
                await answer.leave()
            await asyncio.sleep(rng.choice((0, 0.01, 0.05)))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {getattr(o, "code", type(o).__name__) for o in outcomes if o is not None} <= {"asleep"}
        await master.wake()
        await master.resume()
        for which, answer in answers:
            assert await answer.whole() == expected[which], which
        await idle(master, layout.get("dp_size", 1))
        await until(lambda: metric(master, "kv_cache_pages", engine="0", state="mapped") == 1, "the pinned page")


@pytest.mark.slow
async def test_a_restart_while_it_sleeps(tiny_dir):
    """It sleeps again: others may use its memory."""
    async with running_master(tiny_dir, **ELASTIC, restart_on_failure=True) as master:
        expected = await Answer(master, PROMPTS[1], 20).whole()
        await master.sleep(2)
        engine = processes(ENGINE)[0]
        engine.send_signal(signal.SIGKILL)
        await until(lambda: master.status is EngineStatus.RESTARTING, "the restart")
        await until(lambda: master.status is EngineStatus.SLEEPING and master.residency.state == "sleeping", "sleep")
        assert master.residency.level == 2
        assert processes(ENGINE)[0].pid != engine.pid
        await master.wake()
        assert await Answer(master, PROMPTS[1], 20).whole() == expected
        os.kill(processes(ENGINE)[0].pid, signal.SIGKILL)
        await until(lambda: master.status is EngineStatus.RESTARTING, "the restart")
        await until(lambda: master.status is EngineStatus.READY, "the engine")
        assert master.residency.state == "awake"
        assert await Answer(master, PROMPTS[1], 20).whole() == expected


def test_offline(tiny_dir):
    options = {"dtype": "float32", "num_threads": 1, "max_cache_size": "20MiB", "block_size": 16, **ELASTIC}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(tiny_dir), **options) as llm:
        (before,) = llm.generate("The weather", params)
        for level, tags in ((1, None), (2, ["weights"])):
            llm.sleep(level)
            llm.sleep(level)
            assert llm.is_sleeping
            with pytest.raises(RuntimeError, match="wake_up"):
                llm.generate("The weather", params)
            llm.wake_up(tags)
            assert llm.is_sleeping == (tags is not None)
            llm.wake_up()
            (after,) = llm.generate("The weather", params)
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
            assert after.num_cached_tokens == 0
        for call in (lambda: llm.sleep(3), lambda: llm.wake_up(["kv"])):
            with pytest.raises(ResidencyError) as refused:
                call()
            assert refused.value.code == "invalid"
    with pytest.raises(RuntimeError, match="closed"):
        llm.sleep()
