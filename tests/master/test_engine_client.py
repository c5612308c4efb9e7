"""The HTTP process's end of the engine, with engines that misbehave."""

from __future__ import annotations

import asyncio

import pytest

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_client import Clue, Ending, EngineClient
from xllm_npu.master.engine_plan import plan_on_one_machine
from xllm_npu.master.launcher import ending as ending_of
from xllm_npu.state.messages import EngineFailed

pytestmark = pytest.mark.multiprocess


async def started(tmp_path, on_message, on_exit) -> EngineClient:
    (plan,) = plan_on_one_machine(settings_from_kwargs(model=str(tmp_path)), tmp_path)
    client = EngineClient(plan.launcher, plan.init, on_message, on_exit)
    await client.launch()
    client.listen()
    return client


async def test_a_handler_that_fails_is_reported_and_not_silent(tmp_path):
    ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def on_message(message):
        raise KeyError("a bug")

    def on_exit(ending):
        if not ended.done():
            ended.set_result(ending)

    client = await started(tmp_path, on_message, on_exit)
    try:
        ending = await asyncio.wait_for(ended, 60)
    finally:
        await client.stop(0)
    assert ending.reason == "The engine's messages cannot be handled: KeyError."
    assert not client.alive


async def test_a_refusal_arrives_with_its_own_words(tmp_path):
    heard, ended = [], asyncio.get_running_loop().create_future()
    client = await started(tmp_path, heard.append, ended.set_result)
    try:
        ending = await asyncio.wait_for(ended, 60)
    finally:
        await client.stop(1)
    assert any(isinstance(m, EngineFailed) for m in heard)
    assert ending.clue is Clue.SAID
    assert "config.json" in ending.reason or "safetensors" in ending.reason


def test_how_a_process_ended():
    assert ending_of(3) == "ended with exit code 3"
    assert ending_of(-9) == "was ended by SIGKILL"
    assert ending_of(-64) in ("was ended by SIGRTMAX", "was ended by signal 64")
