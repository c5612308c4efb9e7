"""Clients for an application around a FakeMaster: in this loop (httpx), or over a socket (a real uvicorn)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.service.fake_master import FakeMaster
from xllm_npu.config.service import ServiceSettings
from xllm_npu.config.settings import Settings, served_model_names
from xllm_npu.master.model_set import ModelSet, ServedModel
from xllm_npu.service.admission import Admission
from xllm_npu.service.app import create_app
from xllm_npu.service.connection_limit import ConnectionLimit
from xllm_npu.service.listener import listen, url_of
from xllm_npu.service.server import HttpServer, uvicorn_config


def make_settings(**service: object) -> Settings:
    service.setdefault("served_model_name", ("tiny",))
    return Settings(service=ServiceSettings(**service))


def set_of(master: FakeMaster, settings: Settings) -> ModelSet:
    return ModelSet([ServedModel(served_model_names(settings), master)])


def client_of(master: FakeMaster, **service: object) -> httpx.AsyncClient:
    settings = make_settings(**service)
    app = create_app(set_of(master, settings), settings)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


class LiveServer:
    def __init__(self, url: str, admission: Admission) -> None:
        self.url = url
        self.admission = admission


@contextlib.asynccontextmanager
async def live_server(master: FakeMaster, **service: object) -> AsyncIterator[LiveServer]:
    service.setdefault("port", 0)
    settings = make_settings(**service)
    models = set_of(master, settings)
    admission = Admission(models, settings.service.max_concurrent_requests)
    sock = listen(settings.service)
    limit = ConnectionLimit(settings.service.max_connections, master.metrics.on_rejected)
    http = HttpServer(uvicorn_config(create_app(models, settings, admission), settings.service, limit))
    task = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        yield LiveServer(url_of(sock, settings.service), admission)
    finally:
        http.should_exit = True
        await task


@pytest.fixture
def master() -> FakeMaster:
    return FakeMaster()


@pytest.fixture
async def client(master: FakeMaster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(master) as client:
        yield client
