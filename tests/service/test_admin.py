"""The admin routes over masters that only say what they are told to do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.service.conftest import make_settings
from tests.service.fake_master import FakeMaster
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel
from xllm_npu.service.admin import create_admin_app
from xllm_npu.service.app import coordinator
from xllm_npu.state.messages import Profile, ResetPrefixCache


class ForkingSet(ModelSet):
    def _new_fork(self, parent: FakeMaster, name: str) -> FakeMaster:
        fork = FakeMaster(name=name)
        fork.parent = parent
        return fork


@contextlib.asynccontextmanager
async def admin_of(*masters: FakeMaster, **service: object) -> AsyncIterator[tuple[httpx.AsyncClient, ModelSet]]:
    settings = make_settings(**service)
    models = ForkingSet([ServedModel((name,), master) for name, master in zip(("a", "b"), masters)])
    app = create_admin_app(models, coordinator(models, settings.service), settings.service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client, models


def error_of(reply: httpx.Response) -> tuple[int, str | None, str | None]:
    return reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "body", "transition"),
    [
        ("/sleep", None, ("sleep", 1, "abort")),
        ("/sleep?level=2&mode=keep", None, ("sleep", 2, "keep")),
        ("/sleep", {"model_id": "a", "master_status": "LIGHT_SLEEP"}, ("sleep", 1, "abort")),
        ("/sleep", {"model_id": "a", "master_status": "DEEP_SLEEP", "model_path": "/m", "nnodes": 1},
         ("sleep", 2, "abort")),
        ("/sleep", {"master_status": 2, "mode": "wait"}, ("sleep", 2, "wait")),
        ("/sleep?level=1", {"master_status": 2}, ("sleep", 1, "abort")),
        ("/wakeup", {"model_id": "a"}, ("wake",)),
        ("/wake_up", None, ("wake",)),
        ("/wake_up?tags=weights", None, ("wake", "weights")),
        ("/wake_up?tags=weights&tags=kv_cache", None, ("wake", "weights", "kv_cache")),
        ("/wake_up", {"tags": ["kv_cache"]}, ("wake", "kv_cache")),
        ("/pause?mode=wait", None, ("pause", "wait")),
        ("/pause", {"model": "a", "mode": "keep"}, ("pause", "keep")),
        ("/resume", None, ("resume",)),
    ],
)
async def test_both_spellings(path, body, transition):
    master = FakeMaster()
    async with admin_of(master) as (client, _):
        reply = await client.post(path, **({} if body is None else {"json": body}))
        assert reply.status_code == 200, reply.text
        assert master.transitions == [transition]
        if path.startswith(("/sleep", "/wake")):
            assert reply.content == b""


async def test_which_model_is_meant():
    first, second = FakeMaster(), FakeMaster()
    async with admin_of(first, second) as (client, _):
        assert error_of(await client.post("/sleep")) == (400, None, "model")
        assert error_of(await client.post("/sleep?model=c")) == (404, "model_not_found", "model")
        assert (await client.post("/sleep?model=b")).status_code == 200
        assert (await client.post("/pause", content=b'{"model_id": "a"}')).json() == {"status": "paused"}
        assert (first.transitions, second.transitions) == ([("pause", "abort")], [("sleep", 1, "abort")])
        assert (await client.get("/is_sleeping?model=b")).json() == {"is_sleeping": True}
        assert (await client.get("/is_sleeping?model=a")).json() == {"is_sleeping": False}
        assert (await client.get("/is_paused?model=a")).json() == {"is_paused": True}
        assert error_of(await client.post("/resume?model=b")) == (409, "model_sleeping", None)
        assert (await client.post("/resume?model=a")).json() == {"status": "resumed"}


async def test_again_changes_nothing():
    async with admin_of(FakeMaster()) as (client, _):
        for path in ("/sleep", "/sleep", "/wake_up", "/wakeup", "/pause", "/pause", "/resume", "/resume"):
            assert (await client.post(path)).status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "error"),
    [
        ("/sleep?level=deep", b"", (400, None, "level")),
        ("/sleep?level=3", b"", (400, "invalid_value", None)),
        ("/sleep?level=" + "9" * 5000, b"", (400, None, "level")),
        ("/sleep?mode=soon", b"", (400, "invalid_value", None)),
        ("/sleep", b'{"level": true}', (400, None, "level")),
        ("/sleep", b'{"master_status": "NAP"}', (400, None, "master_status")),
        ("/sleep", b'{"master_status": [1]}', (400, None, "master_status")),
        ("/sleep", b'{"master_status": "WAKEUP"}', (400, "invalid_value", None)),
        ("/sleep", b'{"model": 3}', (400, None, "model")),
        ("/sleep", b"level=1", (400, "invalid_json", None)),
        ("/wake_up", b'{"tags": [1]}', (400, None, "tags")),
        ("/fork_master", b"{}", (400, None, "model_id")),
        ("/fork_master", b'{"model_id": "f", "model_path": "/else"}', (400, None, "model_path")),
        ("/fork_master", b'{"model_id": "f", "remote_addrs": ["10.0.0.1:1"]}', (400, None, "remote_addrs")),
        ("/fork_master", b'{"model_id": "f", "dp_size": 2}', (400, None, "dp_size")),
        ("/nothing", b"", (404, "unknown_url", None)),
    ],
)
async def test_what_is_refused(path, content, error):
    master = FakeMaster()
    async with admin_of(master) as (client, _):
        assert error_of(await client.post(path, content=content)) == error
        assert master.transitions == []


async def test_a_model_that_cannot_sleep_says_so():
    async with admin_of(FakeMaster(vmm_weights=False)) as (client, _):
        assert error_of(await client.post("/sleep")) == (400, "not_supported", None)


@pytest.mark.parametrize(("code", "status"), [("not_ready", 503), ("memory", 503), ("gone", 503)])
async def test_failed_transitions(code, status):
    master = FakeMaster()

    async def fail(tags: object) -> None:
        raise ResidencyError(code, "because")

    master.wake = fail
    async with admin_of(master) as (client, _):
        reply = await client.post("/wake_up")
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, "because")
        assert ("retry-after" in reply.headers) == (code != "gone")


async def test_the_key_counts_and_browsers_do_not():
    async with admin_of(FakeMaster(), api_key=("k",)) as (client, _):
        assert (await client.post("/sleep")).status_code == 401
        assert (await client.get("/status")).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await client.post("/sleep", headers=key)).status_code == 200
        assert error_of(await client.post("/wake_up", headers={**key, "Origin": "http://test"})) == (
            403, "forbidden", None)


async def test_status():
    first, second = FakeMaster(), FakeMaster(status=EngineStatus.LOADING)
    async with admin_of(first, second) as (client, models):
        await first.sleep(2, "wait")
        with models.first.in_use():
            status = (await client.get("/status")).json()
        one, other = status["models"]
        assert status["tasks"] >= 1
        assert one == {**one, "id": "a", "names": ["a"], "status": "sleeping", "state": "sleeping", "level": 2,
                       "tags": [], "last_seconds": {"sleep": 0.5}, "freed_bytes": 7, "requests": 1, "idle_seconds": 0,
                       "weights": {"path": "smollm2", "version": 0}, "failure": None,
                       "virtual_memory_info": {"pages": {"mapped": 3}}}
        assert (other["status"], other["state"], other["requests"]) == ("loading", "awake", 0)
        assert other["idle_seconds"] >= 0


async def test_a_fork_is_served_under_its_name():
    master = FakeMaster()
    async with admin_of(master) as (client, models):
        body = {"model_id": "f", "model_path": "smollm2", "master_status": "WAKEUP", "remote_addrs": [],
                "nnodes": 1, "dp_size": 0}
        for _ in range(2):
            assert (await client.post("/fork_master", json=body)).status_code == 200
        assert [model.name for model in models] == ["a", "f"]
        assert models.of("f").master.transitions == []
        assert error_of(await client.post("/fork_master", json={"model_id": "a"})) == (400, None, "model_path")
        taken = {"model_id": "a", "model": "f"}
        assert error_of(await client.post("/fork_master", json=taken)) == (400, "invalid_value", None)
        asleep = {"model_id": "g", "model": "a", "master_status": 2}
        assert (await client.post("/fork_master", json=asleep)).status_code == 200
        assert models.of("g").master.transitions == [("sleep", 2, "wait")]
        await master.sleep()
        assert error_of(await client.post("/fork_master", json={"model_id": "h", "model": "a"})) == (
            409, "model_sleeping", None)


async def test_cached_prefixes_and_profiles():
    first, second = FakeMaster(), FakeMaster()
    async with admin_of(first, second, profile_dir="/traces") as (client, _):
        assert error_of(await client.post("/reset_prefix_cache")) == (400, None, "model")
        for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
            assert (await client.post(path + "?model=b")).status_code == 200
        assert second.commands == [ResetPrefixCache(), Profile("/traces"), Profile("")]
        assert first.commands == []
        assert error_of(await client.post("/reset_prefix_cache?model=b&reset_running_requests=true")) == (
            400, None, "reset_running_requests")
        second.command_failure = "No profile is being made."
        assert error_of(await client.post("/stop_profile?model=b")) == (409, "conflict", None)
        second.status = EngineStatus.DEAD
        assert error_of(await client.post("/stop_profile?model=b")) == (503, "engine_dead", None)


async def test_profiles_need_a_directory():
    master = FakeMaster()
    async with admin_of(master) as (client, _):
        reply = await client.post("/start_profile")
        assert error_of(reply) == (400, "not_supported", None)
        assert "--profile_dir" in reply.json()["error"]["message"]
    assert master.commands == []


async def test_server_info_hides_the_keys():
    master = FakeMaster()
    master.settings = make_settings(api_key=("hidden-key",))
    async with admin_of(master, api_key=("hidden-key",)) as (client, _):
        reply = await client.get("/server_info", headers={"Authorization": "Bearer hidden-key"})
    assert "hidden-key" not in reply.text
    (model,) = reply.json()["models"]
    assert model["settings"]["service"]["port"] == 8000
    assert model["engine"]["block_size"] == 16 if isinstance(model["engine"], dict) else model["engine"]
