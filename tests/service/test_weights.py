"""The admin routes about weights and about requests that are ended, over masters that only say what they are told."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.service.fake_master import INFO, FakeMaster
from tests.service.test_admin import admin_of, error_of
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.state.messages import WeightLoad

UPDATE, FROM_DISK = "/update_weights", "/update_weights_from_disk"


@pytest.mark.parametrize(("path", "body", "transition", "label"), [
    (UPDATE, {"path": "/new"}, ("update", "/new", "abort"), "1"),
    (UPDATE, {"path": "a/b", "mode": "keep", "weight_version": "step 3"}, ("update", "a/b", "keep"), "step 3"),
    (f"{UPDATE}?path=/new&mode=wait", None, ("update", "/new", "wait"), "1"),
    (FROM_DISK, {"model_path": "/new"}, ("update", "/new", "wait"), "1"),
    (FROM_DISK, {"model_path": "/new", "load_format": None, "flush_cache": True, "torch_empty_cache": True,
                 "recapture_cuda_graph": True, "token_step": 7, "is_async": False, "keep_pause": False,
                 "abort_all_requests": True, "weight_version": "v2"}, ("update", "/new", "abort"), "v2"),
    (FROM_DISK, {"model_path": "/new", "load_format": "auto"}, ("update", "/new", "wait"), "1"),
])  # fmt: skip
async def test_both_spellings(path, body, transition, label):
    master = FakeMaster()
    async with admin_of(master) as (client, _):
        reply = await client.post(path, json=body or {})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert master.transitions == [transition]
        assert answer == {**answer, "status": "updated", "path": transition[1], "version": 1}
        assert answer["seconds"] >= 0
        assert answer.get("success") == (True if path == FROM_DISK else None)
        info = (await client.get("/weight_info")).json()
        assert (info["path"], info["version"], info["weight_version"]) == (transition[1], 1, label)
        assert (await client.post(path, json=body or {})).json()["version"] == 2


@pytest.mark.parametrize(("path", "body", "param"), [
    (UPDATE, {}, "path"), (UPDATE, {"path": ""}, "path"), (UPDATE, {"path": 3}, "path"),
    (UPDATE, {"path": "x" * 4097}, "path"), (UPDATE, {"path": "a\0b"}, "path"), (UPDATE, {"path": "a\nb"}, "path"),
    (UPDATE, {"path": "/m", "weight_version": "v" * 200}, "weight_version"),
    (UPDATE, {"path": "/m", "weight_version": 3}, "weight_version"),
    (UPDATE, {"update_info": {"names": ["w"]}}, "update_info"), (UPDATE, {"path": "/m", "mode": 1}, "mode"),
    (FROM_DISK, {"path": "/m"}, "model_path"), (FROM_DISK, {"model_path": "/m", "load_format": "dummy"}, "load_format"),
    (FROM_DISK, {"model_path": "/m", "flush_cache": False}, "flush_cache"),
    (FROM_DISK, {"model_path": "/m", "is_async": True}, "is_async"),
    (FROM_DISK, {"model_path": "/m", "keep_pause": True}, "keep_pause"),
    (FROM_DISK, {"model_path": "/m", "manifest": {"a": 1}}, "manifest"),
    (FROM_DISK, {"model_path": "/m", "abort_all_requests": "yes"}, "abort_all_requests"),
])  # fmt: skip
async def test_what_is_refused_before_it_is_tried(path, body, param):
    master = FakeMaster()
    async with admin_of(master) as (client, _):
        assert error_of(await client.post(path, json=body)) == (400, None, param)
        assert master.transitions == []


@pytest.mark.parametrize(("code", "error"), [
    ("checkpoint", (400, "invalid_checkpoint", None)), ("unsupported", (400, "not_supported", None)),
    ("invalid", (400, "invalid_value", None)), ("asleep", (409, "model_sleeping", None)),
    ("failed", (503, "failed", None)), ("gone", (503, "engine_dead", None)),
])
async def test_what_masters_refuse(code, error):
    master = FakeMaster()
    master.refuse_weights = ResidencyError(code, "because")
    async with admin_of(master) as (client, _):
        reply = await client.post(UPDATE, json={"path": "/m"})
        assert (error_of(reply), reply.json()["error"]["message"]) == (error, "because")
        assert (await client.get("/weight_info")).json()["version"] == 0


async def test_weights_that_forks_share_are_not_replaced():
    async with admin_of(FakeMaster()) as (client, models):
        assert (await client.post("/fork_master", json={"model_id": "f"})).status_code == 200
        for name, other in (("a", "its fork f"), ("f", "a fork of")):
            reply = await client.post(UPDATE, json={"model": name, "path": "/m"})
            assert error_of(reply) == (409, "conflict", None)
            assert other in reply.json()["error"]["message"]
        models.of("f").master.status = EngineStatus.DEAD
        assert (await client.post(UPDATE, json={"model": "a", "path": "/m"})).status_code == 200


async def test_no_fork_is_made_while_weights_are_replaced():
    master = FakeMaster()
    master.may_update.clear()
    async with admin_of(master) as (client, _):
        updating = asyncio.create_task(client.post(UPDATE, json={"path": "/m"}))
        while not master.transitions:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert error_of(await client.post("/fork_master", json={"model_id": "f", "model": "a"})) == (
            409, "conflict", None)
        master.may_update.set()
        assert (await updating).status_code == 200
        assert (await client.post("/fork_master", json={"model_id": "f", "model": "a"})).status_code == 200


async def test_what_weights_are():
    first, second = FakeMaster(), FakeMaster(status=EngineStatus.LOADING)
    first.info = msgspec.structs.replace(INFO, ranks=8, engines=2, weight_loads=[
        WeightLoad(rank, 100 + rank, 1.0, 1, 1000) for rank in range(8)])
    async with admin_of(first, second) as (client, _):
        assert (await client.get("/weight_info?model=a")).json() == {
            "model": "a", "path": "smollm2", "version": 0, "weight_version": "0", "bytes": 828, "dtype": "float32",
            "parameters": 1000}
        assert (await client.get("/get_world_size?model=a")).json() == {"world_size": 8}
        assert (await client.get("/get_world_size?model=a&include_dp=true")).json() == {"world_size": 8}
        assert (await client.get("/get_world_size?model=a&include_dp=false")).json() == {"world_size": 4}
        for path in ("/weight_info", "/get_world_size"):
            assert error_of(await client.get(path)) == (400, None, "model")
            assert error_of(await client.get(path + "?model=b")) == (503, "engine_loading", None)


async def test_requests_are_ended_by_id_or_all_of_a_model():
    first, second = FakeMaster(), FakeMaster()
    async with admin_of(first, second) as (client, _):
        reply = await client.post("/abort_requests", json={"request_ids": ["chatcmpl-1", "2"]})
        assert (reply.status_code, reply.json()) == (200, {"aborted": 4})
        assert (await client.post("/abort_requests", json={"model": "b"})).json() == {"aborted": 1}
        assert (await client.post("/abort_requests", json={"model": "a", "request_ids": ["3"]})).status_code == 200
        assert error_of(await client.post("/abort_requests", json={})) == (400, None, "model")
        assert error_of(await client.post("/abort_requests", json={"request_ids": [1]})) == (400, None, "request_ids")
        assert first.abortions == [["chatcmpl-1", "2"], ["3"]]
        assert second.abortions == [["chatcmpl-1", "2"], []]
