"""A server process around a FakeMaster, driven by signals: run as `python -m tests.service.server_process JSON`.

SIGUSR1 lets the engine go on (loading ends, waiting requests finish); SIGUSR2 is the engine's death.
Whatever the server asks of the master is told on stdout.
"""

import asyncio
import json
import signal
import sys

from tests.service.conftest import make_settings, set_of
from tests.service.fake_master import INFO, FakeMaster, output
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.service.listener import listen, remove_unix_socket
from xllm_npu.service.server import serve
from xllm_npu.state.messages import EngineProgress
from xllm_npu.state.output import SequenceDelta


def tell(text: str) -> None:
    print(text, flush=True)


class ProcessMaster(FakeMaster):
    def __init__(self, loads: bool, start_fails: bool) -> None:
        super().__init__(self.script_of, EngineStatus.LOADING)
        self._loads = loads
        self._start_fails = start_fails
        self._go = asyncio.Event()

    async def start(self) -> None:
        if self._start_fails:
            raise RuntimeError("there is no model.")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.go_on)
        loop.add_signal_handler(signal.SIGUSR2, self.die)
        if self._loads:
            for done in range(9):
                self.on_progress(EngineProgress("Loading weights", done << 20, 8 << 20, "B"))
        else:
            self.go_on()
            self._go.clear()
        tell("started")

    def go_on(self) -> None:
        self.info = INFO
        self.status = EngineStatus.READY
        self._go.set()

    def die(self) -> None:
        self.failure = "the engine process was killed by signal 9."
        self.status = EngineStatus.DEAD
        self._go.set()

    async def script_of(self, request):
        tell("request")
        yield output(request, SequenceDelta(0, "begun", [1]))
        await self._go.wait()
        if self.status is EngineStatus.DEAD:
            yield output(request, finished=True, error="The engine stopped.")
        else:
            yield output(request, SequenceDelta(0, "ended", [1], None, "stop"), finished=True)

    async def shutdown(self, timeout: float) -> None:  # noqa: ASYNC109
        tell(f"shutdown {timeout:g}")

    def kill(self) -> None:
        tell("kill")


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    master = ProcessMaster(options.pop("loads", False), options.pop("start_fails", False))
    settings = make_settings(**options)
    sock = listen(settings.service)
    code = serve(set_of(master, settings), settings, sock)
    remove_unix_socket(settings.service)
    sys.exit(code)
