"""Requests for models that sleep, and models that make room for each other, over masters that share a small memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.service.conftest import make_settings
from tests.service.fake_master import FakeMaster, FakeMemory, says, says_then_waits
from xllm_npu.config.execution import ExecutionSettings
from xllm_npu.config.settings import Settings
from xllm_npu.master import residency as residency_module
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.master.model_residency import ResidencyError, ResidencyState
from xllm_npu.master.model_set import ModelSet, ServedModel
from xllm_npu.service.admission import Admission
from xllm_npu.service.app import coordinator, create_app
from xllm_npu.service.connection_limit import ConnectionLimit
from xllm_npu.service.errors import unavailable
from xllm_npu.service.listener import listen, url_of
from xllm_npu.service.server import HttpServer, uvicorn_config

CHAT = "/v1/chat/completions"


def body(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}]}


@contextlib.asynccontextmanager
async def client_of(*masters: FakeMaster, **service: object) -> AsyncIterator[httpx.AsyncClient]:
    """Models a, b, ... behind an application."""
    app = create_app(set_of(*masters), make_settings(**service))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def set_of(*masters: FakeMaster) -> ModelSet:
    return ModelSet([ServedModel((name,), master) for name, master in zip("abcd", masters)])


async def until(question) -> None:
    async with asyncio.timeout(20):
        while not question():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
def asleep() -> FakeMaster:
    return sleeper(FakeMemory())


def sleeper(memory: FakeMemory, **options: object) -> FakeMaster:
    room, memory.room = memory.room, None
    master = FakeMaster(memory=memory, **options)
    memory.awake.discard(master)
    memory.room = room
    master.status, master.residency = EngineStatus.SLEEPING, ResidencyState("sleeping", 1, ())
    return master


async def test_a_sleeping_model_refuses_and_the_rest_goes_on(asleep):
    async with client_of(FakeMaster(), asleep) as client:
        refused = await client.post(CHAT, json=body("b"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_sleeping")
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.post(CHAT, json=body("a"))).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
        assert (await client.post("/tokenize", json={"model": "b", "prompt": "x"})).status_code == 200
        assert asleep.transitions == []


async def test_many_requests_wake_it_once(asleep):
    asleep.may_wake.clear()
    async with client_of(FakeMaster(), asleep, auto_wakeup=True) as client:
        asks = [asyncio.create_task(client.post(CHAT, json=body("b"))) for _ in range(5)]
        await asleep.wakes.wait()
        assert (await client.post(CHAT, json=body("a"))).status_code == 200  # meanwhile
        assert asleep.requests == []
        asleep.may_wake.set()
        assert [reply.status_code for reply in await asyncio.gather(*asks)] == [200] * 5
        assert asleep.transitions == [("wake",)]


async def test_the_wait_is_bounded(asleep):
    asleep.may_wake.clear()
    async with client_of(asleep, auto_wakeup=True, wakeup_timeout=0.01) as client:
        late = await client.post(CHAT, json=body("a"))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_sleeping")
        assert "0.01 seconds" in late.json()["error"]["message"]
        assert "retry-after" in late.headers


async def test_a_wake_up_that_fails_is_told_to_all_and_tried_again(asleep):
    asleep.may_wake.clear()
    asleep.memory.room = 0
    async with client_of(asleep, auto_wakeup=True) as client:
        asks = [asyncio.create_task(client.post(CHAT, json=body("a"))) for _ in range(3)]
        await asleep.wakes.wait()
        asleep.may_wake.set()
        for reply in await asyncio.gather(*asks):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "insufficient_memory")
            assert reply.json()["error"]["message"] == "There is not enough memory."
        asleep.memory.room = 1
        assert (await client.post(CHAT, json=body("a"))).status_code == 200


async def test_a_client_that_leaves_is_not_waited_for(asleep):
    asleep.may_wake.clear()
    settings = make_settings(auto_wakeup=True, port=0)
    models = set_of(asleep)
    admission = Admission(models, 0)
    sock = listen(settings.service)
    app = create_app(models, settings, admission)
    http = HttpServer(uvicorn_config(app, settings.service, ConnectionLimit(10)))
    task = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        async with httpx.AsyncClient(base_url=url_of(sock, settings.service)) as client:
            ask = asyncio.create_task(client.post(CHAT, json=body("a")))
            await asleep.wakes.wait()
            assert admission.in_flight == 1
            ask.cancel()
            await until(lambda: admission.in_flight == 0)
        asleep.may_wake.set()
        assert asleep.requests == []
    finally:
        http.should_exit = True
        await task


async def test_the_server_ends_those_that_wait(asleep):
    asleep.may_wake.clear()
    models, settings = set_of(asleep), make_settings(auto_wakeup=True)
    admission = Admission(models, 0)
    app = create_app(models, settings, admission)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        ask = asyncio.create_task(client.post(CHAT, json=body("a")))
        await asleep.wakes.wait()
        admission.abort_all(unavailable("The server is shutting down.", "shutting_down"))
        assert (await ask).json()["error"]["code"] == "shutting_down"


# Models that do not fit together


def pair(room: int = 1) -> tuple[FakeMaster, FakeMaster]:
    memory = FakeMemory(room)
    return FakeMaster(memory=memory), sleeper(memory)


async def test_without_the_flag_nobody_makes_room():
    first, second = pair()
    async with client_of(first, second, auto_wakeup=True) as client:
        refused = await client.post(CHAT, json=body("b"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
        assert first.transitions == []


async def test_two_models_serve_alternately():
    first, second = pair()
    async with client_of(first, second, auto_wakeup=True, evict_idle_models=True) as client:
        for name in "babbaab":
            assert (await client.post(CHAT, json=body(name))).status_code == 200
    # a wake-up that finds no room is tried again after the other has gone to sleep
    assert second.transitions == [("wake",), ("wake",), ("sleep", 1, "wait"), ("wake",), ("wake",),
                                  ("sleep", 1, "wait"), ("wake",), ("wake",)]
    assert len(first.requests) + len(second.requests) == 7


async def test_weights_that_the_host_has_no_room_for_are_dropped():
    first, second = pair()
    first.host_has_room = False
    async with client_of(first, second, auto_wakeup=True, evict_idle_models=True) as client:
        assert (await client.post(CHAT, json=body("b"))).status_code == 200
    assert first.transitions == [("sleep", 1, "wait"), ("sleep", 2, "wait")]


async def test_a_model_that_stands_still_gets_the_memory_of_one_that_idles():
    memory = FakeMemory()
    needy, idle = FakeMaster(memory=memory), FakeMaster(memory=memory)
    models = set_of(needy, idle)
    watch = asyncio.create_task(coordinator(models, make_settings(evict_idle_models=True).service).watch())
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        assert idle.transitions == []
        needy.stalled = True
        with models.first.in_use():
            async with asyncio.timeout(20):
                while not idle.transitions:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert (needy.transitions, idle.transitions) == ([], [("sleep", 1, "wait")])
    finally:
        watch.cancel()


async def test_a_model_that_cannot_be_started_again_is_helped_once_each_time(monkeypatch):
    monkeypatch.setattr(residency_module, "STALL_POLL_SECONDS", 0)
    memory = FakeMemory()
    failing, *idle = [FakeMaster(memory=memory) for _ in range(3)]
    models = set_of(failing, *idle)
    watch = asyncio.create_task(coordinator(models, make_settings(evict_idle_models=True).service).watch())

    async def turns() -> list[int]:
        for _ in range(50):
            await asyncio.sleep(0)
        return [len(master.transitions) for master in idle]

    try:
        failing.status, failing.lacked_memory = EngineStatus.RESTARTING, False
        assert await turns() == [0, 0]
        failing.lacked_memory = True
        assert await turns() == [1, 0]
        failing.lacked_memory = False  # new engines, which fail too
        assert await turns() == [1, 0]
        failing.lacked_memory = True
        assert await turns() == [1, 1]
    finally:
        watch.cancel()


async def test_one_that_works_finishes_and_those_that_come_for_it_wait():
    first, second = pair()
    gate = asyncio.Event()
    first.script = says_then_waits("begun", gate)
    async with client_of(first, second, auto_wakeup=True, evict_idle_models=True) as client:
        open_one = asyncio.create_task(client.post(CHAT, json=body("a")))
        await first.submitted_one.wait()
        for_other = asyncio.create_task(client.post(CHAT, json=body("b")))
        await second.wakes.wait()  # and was refused
        late = asyncio.create_task(client.post(CHAT, json=body("a")))
        await until(lambda: late.done() or len(first.requests) == 1)
        assert first.transitions == []
        gate.set()
        assert [(await ask).status_code for ask in (open_one, for_other, late)] == [200] * 3
        assert first.transitions == [("sleep", 1, "wait"), ("wake",), ("wake",)]


async def test_one_that_starts_waits_for_those_that_work():
    first, second = pair()
    models = set_of(first, second)
    hasty = coordinator(models, make_settings(evict_idle_models=True, wakeup_timeout=0.01).service)
    residency = coordinator(models, make_settings(evict_idle_models=True).service)
    with models.first.in_use():
        assert not await residency.make_room(models.of("b"), patient=False)
        assert not await hasty.make_room(models.of("b"), patient=True)
        assert hasty.is_ready(models.first)
        assert first.transitions == []
        room = asyncio.create_task(residency.make_room(models.of("b"), patient=True))
        await until(lambda: not residency.is_ready(models.first))
    assert await room
    assert first.transitions == [("sleep", 1, "wait")]


async def test_one_that_never_ends_is_not_waited_for_forever():
    first, second = pair()
    first.script = says_then_waits("begun", asyncio.Event())
    async with client_of(first, second, auto_wakeup=True, evict_idle_models=True, wakeup_timeout=0.05) as client:
        endless = asyncio.create_task(client.post(CHAT, json=body("a")))
        await first.submitted_one.wait()
        assert (await client.post(CHAT, json=body("b"))).json()["error"]["code"] == "model_sleeping"
        first.script = says("Hello")
        assert (await client.post(CHAT, json=body("a"))).status_code == 200  # it is nobody's victim any more
        assert first.transitions == []
        endless.cancel()


async def test_the_least_recently_used_of_those_that_may_sleep_makes_room():
    memory = FakeMemory(4)
    masters = [FakeMaster(memory=memory) for _ in range(3)]
    fixed = FakeMaster(memory=memory, vmm_weights=False)
    paused, used, idle = masters
    paused.residency = ResidencyState("paused")
    needy = sleeper(memory)
    elsewhere = FakeMaster()
    elsewhere.settings = Settings(kv_cache=needy.settings.kv_cache, execution=ExecutionSettings(device_id=3))
    named = {"elsewhere": elsewhere, "paused": paused, "fixed": fixed, "idle": idle, "used": used, "needy": needy}
    models = ModelSet([ServedModel((name,), master, last_use=use) for use, (name, master) in enumerate(named.items())])
    residency = coordinator(models, make_settings(evict_idle_models=True).service)
    await residency.wake(models.of("needy"))
    assert idle.transitions == [("sleep", 1, "wait")]
    assert all(master.transitions == [] for master in (paused, used, fixed, elsewhere))
    with models.of("used").in_use():  # an operator's wake-up does not wait for those that work
        await residency.sleep(models.of("needy"), 1, "abort")
        await idle.wake()
        with models.of("idle").in_use(), pytest.raises(ResidencyError, match="not enough memory"):
            await residency.wake(models.of("needy"))
