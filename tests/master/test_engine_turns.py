"""An engine that always has something to say leaves the event loop to others too."""

from __future__ import annotations

import asyncio

import msgspec

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master import engine_client
from xllm_npu.master.engine_client import EngineClient
from xllm_npu.master.engine_plan import plan_on_one_machine
from xllm_npu.state.messages import StepOutputs

MESSAGES = 100


class Talkative:
    """A socket on which the next message has always arrived."""

    def __init__(self) -> None:
        self.left = MESSAGES

    async def recv(self) -> bytes:
        self.left -= 1
        if self.left < 0:
            await asyncio.Event().wait()
        return msgspec.msgpack.encode(StepOutputs())


async def test_others_run_while_messages_keep_coming(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "TURN_SECONDS", 0.0)
    heard = turns = 0

    def on_message(message):
        nonlocal heard
        heard += 1

    (plan,) = plan_on_one_machine(settings_from_kwargs(model=str(tmp_path)), tmp_path)
    client = EngineClient(plan.launcher, plan.init, on_message, lambda ending: None)
    client._incoming = Talkative()
    reading = asyncio.create_task(client._read())
    while heard < MESSAGES:
        await asyncio.sleep(0)
        turns += 1
    reading.cancel()
    assert turns >= MESSAGES
