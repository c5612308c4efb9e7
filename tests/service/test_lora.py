"""Adapters over HTTP: as models of requests and of the list, loaded and unloaded, with every refusal a clear 400."""

from __future__ import annotations

import httpx
import pytest

from tests.service.conftest import make_settings, set_of
from tests.service.fake_master import FakeMaster
from xllm_npu.config.lora import LoraSettings
from xllm_npu.config.settings import Settings
from xllm_npu.service.admin import create_admin_app
from xllm_npu.service.app import coordinator, create_app

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def master() -> FakeMaster:
    return FakeMaster(lora=LoraSettings(enable_lora=True))


def client_of(master: FakeMaster, allowed: bool = True) -> httpx.AsyncClient:
    service = make_settings().service
    models = set_of(master, make_settings())
    app = create_app(models, Settings(service=service, lora=LoraSettings(
        enable_lora=True, allow_runtime_lora_updating=allowed)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def load(client, name="a", path="/some/where/sql", **more) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": path, **more})


async def test_an_adapter_is_a_model_until_it_is_unloaded(master):
    async with client_of(master) as client:
        reply = await load(client)
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(c["id"], c["parent"], c["root"]) for c in cards] == [("tiny", None, "tiny"), ("a", "tiny", "sql")]
        assert (await client.get("/v1/models/a")).json()["parent"] == "tiny"
        for name in ("tiny", "a"):
            body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
            assert (await client.post("/v1/chat/completions", json=body)).json()["model"] == name
            assert (await client.post("/v1/completions", json={"model": name, "prompt": "x"})).status_code == 200
        assert [one.lora_id for one in master.requests] == [0, 0, 1, 1]
        reply = await client.post(UNLOAD, json={"lora_name": "a"})
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert (await client.post("/v1/completions", json={"model": "a", "prompt": "x"})).status_code == 404
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 404


async def test_what_is_refused(master):
    async with client_of(master) as client:
        assert (await load(client)).status_code == 200
        for body, param, message in (
            ({"lora_name": "a", "lora_path": "/p"}, "lora_name", "load_inplace"),
            ({"lora_name": "tiny", "lora_path": "/p"}, "lora_name", "a model is called"),
            ({"lora_path": "/p"}, "lora_name", "lora_name"),
            ({"lora_name": "b"}, "lora_path", "lora_path"),
            ({"lora_name": 3, "lora_path": "/p"}, "lora_name", "lora_name"),
            ({"lora_name": "b", "lora_path": "/p", "load_inplace": "yes"}, "load_inplace", "load_inplace"),
            ({"lora_name": "b" * 300, "lora_path": "/p"}, "lora_name", "256"),
            ({"lora_name": "b", "lora_path": "/p\0"}, "lora_path", "directory"),
        ):
            reply = await client.post(LOAD, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
            assert message in reply.json()["error"]["message"]
        assert (await load(client, load_inplace=True)).status_code == 200
        assert (await load(client, "b", model="nobody")).status_code == 404
        master.command_failure = "adapter_config.json: DoRA (use_dora) is not supported."
        reply = await load(client, "b")
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == f"The adapter b cannot be loaded: {master.command_failure}"
        assert (await client.post(LOAD, content=b"{}")).status_code == 415  # what a form of a browser could send


async def test_clients_may_not_unless_a_flag_says_so(master):
    async with client_of(master, allowed=False) as client:
        assert (await load(client)).status_code == 403
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 403
        assert not master.commands


async def test_the_admin_listener_may(master):
    settings = make_settings()
    models = set_of(master, settings)
    app = create_admin_app(models, coordinator(models, settings.service), settings.service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await load(client)).status_code == 200
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 200
        assert (await client.post(UNLOAD, json={"lora_name": "a"})).status_code == 404


async def test_a_model_without_adapters():
    async with client_of(FakeMaster()) as client:
        reply = await load(client)
        assert reply.status_code == 400
        assert "--enable_lora" in reply.json()["error"]["message"]
