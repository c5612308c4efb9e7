"""The HTTP process's end of the engine, with engines that misbehave."""

from __future__ import annotations

import asyncio

import pytest

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_client import EngineClient
from xllm_npu.state.messages import EngineFailed


@pytest.mark.multiprocess
async def test_a_handler_that_fails_is_reported_and_not_silent(tmp_path):
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_message(message):
        raise KeyError("a bug")

    def on_exit(reason):
        if not ended.done():
            ended.set_result(reason)

    client = EngineClient(settings_from_kwargs(model=str(tmp_path)), on_message, on_exit)
    await client.start()
    try:
        reason = await asyncio.wait_for(ended, 60)
    finally:
        await client.stop(0)
    assert reason == "The engine's messages cannot be handled: KeyError."
    assert not client.alive


@pytest.mark.multiprocess
async def test_a_refusal_arrives_with_its_own_words(tmp_path):
    heard, ended = [], asyncio.get_running_loop().create_future()
    client = EngineClient(settings_from_kwargs(model=str(tmp_path)), heard.append, ended.set_result)
    await client.start()
    try:
        reason = await asyncio.wait_for(ended, 60)
    finally:
        await client.stop(1)
    assert any(isinstance(m, EngineFailed) for m in heard)
    assert "config.json" in reason or "safetensors" in reason
    assert client._directory is None
