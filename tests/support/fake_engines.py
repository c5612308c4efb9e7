"""Engine processes that are tasks of the test's own process, on real sockets; they say what the test wants."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from xllm_npu.state.launch import EngineInit
from xllm_npu.state.messages import ClientMessage, EngineReady

READY = EngineReady(
    model_name="m", architecture="a", platform="cpu", device="d", dtype="float32", vocab_size=10, max_model_len=64,
    eos_token_ids=[], num_kv_blocks=20, block_size=4, max_seqs=8, max_tokens_per_batch=16, weight_bytes=1,
    kv_cache_bytes=2, graph_sizes=[], load_seconds=1.0)


class FakeEngine:
    """A child that is a task of this process: it hears what an engine hears and says what the test wants."""

    def __init__(self, line: bytes) -> None:
        self.init = msgspec.json.decode(line, type=EngineInit)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.context = zmq.asyncio.Context()
        self.inbox, self.outbox = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.connected = self.inbox.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        self.inbox.connect(self.init.requests)
        self.outbox.connect(self.init.outputs)

    @property
    def where(self) -> str:
        return f"pid {self.init.dp_rank}"

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    def kill(self) -> None:
        self.end("was ended by SIGKILL")

    def end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def close(self) -> None:
        self.context.destroy(linger=0)

    async def be_ready(self, ready: EngineReady = READY) -> None:
        assert await self.connected.poll(10_000)  # a real engine connects long before it has loaded
        await self.say(ready)

    async def say(self, message) -> None:
        await self.outbox.send(msgspec.msgpack.encode(message))

    async def hear(self) -> ClientMessage:
        raw = await asyncio.wait_for(self.inbox.recv(), 10)
        return msgspec.msgpack.decode(raw, type=ClientMessage)

    async def hears_nothing(self) -> bool:
        return not await self.inbox.poll(50)


class FakeLauncher:
    def __init__(self) -> None:
        self.engines: dict[int, FakeEngine] = {}

    async def start(self, entry, line):
        assert entry == "engine"
        engine = FakeEngine(line)
        self.engines[engine.init.dp_rank] = engine
        return engine
