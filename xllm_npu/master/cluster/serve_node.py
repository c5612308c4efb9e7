"""`run_node(settings) -> exit code`: the life of `xllm-npu serve` on every machine but node 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

from xllm_npu.config.settings import Settings
from xllm_npu.execution.device_probe import ProbeError, probe
from xllm_npu.master.cluster.agent import NodeAgent
from xllm_npu.master.cluster.identity import identify

log = logging.getLogger(__name__)

EXIT_FAILURE = 1


def run_node(settings: Settings) -> int:
    """Until the server ends or a signal comes; 1 with one sentence on stderr where it was a failure, else 0."""
    try:
        failure = asyncio.run(_run(settings))
    except ProbeError as error:
        failure = str(error)
    if failure is None:
        return 0
    print(f"xllm-npu: {failure}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


async def _run(settings: Settings) -> str | None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    probing = loop.run_in_executor(None, probe, settings.execution.platform)
    await _first_of(probing, stopped)
    if stopped.done():
        return None
    agent = NodeAgent(settings, identify(settings, await probing))
    running = asyncio.create_task(agent.run())
    await _first_of(running, stopped)
    if not running.done():
        agent.stop(f"was stopped by {signal.Signals(stopped.result()).name}")
    return await running


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
