"""Pauses of a model that serves, over real engine processes: abort, wait and keep."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.master import Answer, metric, prompt_of, running_master, until
from tests.support.server import DEADLINE, ServerProcess
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.master.residency_error import ResidencyError

pytestmark = pytest.mark.multiprocess


async def stands_still(master: LLMMaster, *answers: Answer) -> None:
    """No token comes while the engines take turns: each answers a pause in a turn of its own."""
    before = [a.count for a in answers]
    for _ in range(8):
        await master.pause("keep")
    assert [a.count for a in answers] == before


async def test_pauses(tiny_dir):
    async with running_master(tiny_dir) as master:
        prompts = [prompt_of(50 + 40 * i, i) for i in range(3)]
        undisturbed = [await Answer(master, p, 400).whole() for p in prompts]

        kept = [Answer(master, p, 400) for p in prompts]  # keep: in mid-decode
        for answer in kept:
            await answer.begun(5)
        await master.pause("keep")
        assert (master.residency.state, master.status) == ("paused", EngineStatus.READY)
        late = Answer(master, prompts[0], 4)
        await stands_still(master, *kept, late)
        assert not any(a.done for a in kept)
        await master.pause("keep")
        await master.resume()
        assert [await a.whole() for a in kept] == undisturbed
        assert await late.whole() == undisturbed[0][:4]
        await master.resume()
        assert master.residency.state == "awake"

        first = [Answer(master, p, 100) for p in prompts]  # wait: they finish, new ones do not begin
        await first[0].begun()
        pausing = asyncio.create_task(master.pause("wait"))
        await until(lambda: master.residency.transition == "pause", "the pause")
        late = Answer(master, prompts[1], 4)
        await pausing
        assert [(await a.whole()) for a in first] == [u[:100] for u in undisturbed]
        await stands_still(master, late)
        left = Answer(master, prompts[2], 4)
        await left.leave()
        await master.resume()
        assert await late.whole() == undisturbed[1][:4]
        assert left.count == 0

        several = Answer(master, prompts[0], 400, n=3)  # abort: they end and say so
        await several.begun(5)
        await master.pause("abort")
        await several.whole()
        assert several.last is not None
        assert several.last.error is None
        assert set(several.reasons.values()) == {"abort"}
        await master.resume()
        assert await Answer(master, prompts[2], 9).whole() == undisturbed[2][:9]
        with pytest.raises(ResidencyError) as refused:
            await master.sleep()
        assert refused.value.code == "unsupported"
        assert set(master.residency.last_seconds) == {"pause", "resume"}
        assert metric(master, "engine_sleep_state", sleep_state="awake") == 1
        assert metric(master, "residency_transition_seconds_count", transition="pause") == 20


@pytest.mark.slow
async def test_a_beam_search_is_one_request(tiny_dir):
    """It comes to the engine in many: a pause that lets it finish lets all of them pass."""
    async with running_master(tiny_dir) as master:
        prompt, beams = prompt_of(40), {"n": 2, "use_beam_search": True}
        alone = Answer(master, prompt, 12, **beams)
        await alone.whole()
        steps = metric(master, "engine_steps_total", engine="0")
        search = Answer(master, prompt, 12, **beams)
        await until(lambda: metric(master, "engine_steps_total", engine="0") > steps + 2, "the search")
        await master.pause("wait")
        await search.whole()
        assert search.tokens == alone.tokens
        await master.resume()
        for mode in ("keep", "abort", "abort", "abort"):  # wherever it is between its parts
            steps = metric(master, "engine_steps_total", engine="0")
            search = Answer(master, prompt, 12, **beams)
            await until(lambda at=steps: metric(master, "engine_steps_total", engine="0") > at + 2, "the search")
            await master.pause(mode)
            if mode == "keep":
                await stands_still(master, search)
                assert not search.done
                await master.resume()
                await search.whole()
                assert search.tokens == alone.tokens
            else:
                await search.whole()
                assert search.last is not None
                assert "ended by the server's operator" in (search.last.error or "")
                await master.resume()


@pytest.mark.slow
def test_a_server_that_ends_does_not_wait_for_a_paused_model(tiny_dir, tmp_path):
    """What it holds ends by an abort, and not by the time that running requests get."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        ServerProcess(tiny_dir, tmp_path, "--admin-port", str(port), uds=True) as server, server.client() as client,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True}
        answer = pool.submit(client.post, "/v1/completions", json=body)
        server.wait_running(1)
        assert httpx.post(f"http://127.0.0.1:{port}/pause?mode=keep", timeout=DEADLINE).status_code == 200
        assert not answer.done()
        assert server.stop() == 0
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.slow
async def test_data_parallel_ranks_pause_together(tiny_dir):
    async with running_master(tiny_dir, dp_size=2) as master:
        prompts = [prompt_of(30 + i, i) for i in range(4)]
        undisturbed = [await Answer(master, p, 100).whole() for p in prompts]
        for _ in range(3):
            kept = [Answer(master, p, 100) for p in prompts]
            await kept[0].begun()
            await master.pause("keep")
            await stands_still(master, *kept)
            await master.resume()
            assert [await a.whole() for a in kept] == undisturbed
