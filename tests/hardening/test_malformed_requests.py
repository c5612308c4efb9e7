"""No request can take the server down: hostile ones by the thousand, many at once, over all routes and both listeners.

After each hundred a good request is answered with the tokens it always was; nothing is answered with a 5xx but what the
documentation says; at the end the server holds what it held at the start. The same seed makes the same requests; a
failure names those that were answered wrongly: `attack(SEED, number)`.
"""

import asyncio
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.hardening.attacks import Attack, attack
from tests.hardening.footprint import settled
from tests.support.pooling_models import make_encoder
from tests.support.server import ServerProcess
from xllm_npu.master.cluster.network import free_ports

pytestmark = pytest.mark.multiprocess

SEED = int(os.environ.get("XLLM_NPU_HARDENING_SEED", "1"))
AT_ONCE = 32
FLAGS = ("--max-body-bytes", "1MiB", "--trust-request-chat-template", "true",
         "--responses-store-size", "20", "--max-concurrent-requests", "100")
# The only 503 of a server that is well: other clients' grammars are being compiled.
BUSY = re.compile(rb'"code":"grammars_busy"')
FAULT = re.compile(rb'"internal_error"|"code":5\d\d')
LEAKS = re.compile(FAULT.pattern + rb"|Traceback|site-packages|xllm_npu/|\.py\b|line \d+, in ")
GOOD = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}
# MiB that a process may have grown by after it is warm. An engine keeps what it has compiled of the last 256 grammars,
# and the HTTP process is trimmed when it has grown by 64.
GROWTH = 160


class Besieged:
    """A server, its admin listener, and what it answered."""

    def __init__(self, server: ServerProcess, admin_url: str) -> None:
        self.server, self.admin_url = server, admin_url
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._url = server.url
        self.expected = self.good()

    def good(self) -> list[int]:
        reply = httpx.post(f"{self._url}/v1/completions", json=GOOD, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    def warm_up(self) -> None:
        """Start what is started with the first request that needs it, and then stays: the processes for grammars."""
        async def at_once() -> None:
            async with (httpx.AsyncClient(base_url=self._url, timeout=120) as client,
                        asyncio.TaskGroup() as group):
                for regex in ("a{50}", "(a|b){40}c", "[a-z]{60}", "d{9}"):
                    group.create_task(client.post("/v1/completions", json={
                        "model": "tiny", "prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": regex}}))

        asyncio.run(at_once())

    def assert_serves(self, number: int) -> None:
        assert self.good() == self.expected, f"after {number} attacks"

    async def fire(self, first: int, last: int) -> None:
        numbers = iter(range(first, last))

        async def one_after_another() -> None:
            for number in numbers:
                await self._one(number, attack(SEED, number))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one_after_another())

    async def _one(self, number: int, case: Attack) -> None:
        address = urlsplit(self.admin_url if case.admin else self._url)
        try:
            await case.exchange.run(address.hostname, address.port)
        except TimeoutError:
            self.wrong.append(f"{number} ({case.what}): hangs")
            return
        answer, statuses = bytes(case.exchange.answer), case.exchange.statuses
        self.statuses.update(statuses)
        failed = [status for status in statuses if status >= 500]
        if failed and not (set(failed) == {503} and BUSY.search(answer)):
            self.wrong.append(f"{number} ({case.what}): {failed} {answer[-300:]!r}")
        elif told := LEAKS.search(answer) if "console" not in case.what else FAULT.search(answer):
            self.wrong.append(f"{number} ({case.what}): says {told[0]!r}: {answer[-300:]!r}")

    def besiege(self, count: int, warm: int) -> None:
        self.warm_up()
        before = settled(self.server, self.admin_url)
        memory = None
        for first in range(0, count, 100):
            asyncio.run(self.fire(first, min(first + 100, count)))
            self.assert_serves(first + 100)
            assert len(self.wrong) < 10, "\n".join(self.wrong)
            if first + 100 == warm:
                memory = settled(self.server, self.admin_url, before)
        assert not self.wrong, "\n".join(self.wrong)
        after = settled(self.server, self.admin_url, before)
        assert memory is None or after.grown(memory) < GROWTH
        assert self.server.running
        # The attacks reach the routes: all of these are answers that a good part of them should get.
        expected = (200, 400, 404, 405, 415) if count > 1000 else (200, 400, 404, 415)
        assert all(self.statuses[status] > count // 500 for status in expected), self.statuses
        print(count, "attacks:", dict(sorted(self.statuses.items())), "MiB:", [m // 2**20 for m in after.memory],
              "when warm:", memory and [m // 2**20 for m in memory.memory])


@contextlib.contextmanager
def besieged(directory: Path, models: list[dict[str, object]], *flags: str) -> Iterator[Besieged]:
    file = directory / "models.json"
    file.write_text(json.dumps({"models": models}))
    [port] = free_ports("127.0.0.1", 1)
    with ServerProcess.of_file(file, directory / "run", *FLAGS, "--admin-port", str(port), *flags) as server:
        yield Besieged(server, f"http://127.0.0.1:{port}")


def writer(model: Path) -> dict[str, object]:
    return {"model": str(model), "served_model_name": ["tiny"], "max_model_len": 512}


@pytest.mark.slow
def test_three_hundred(tiny_dir: Path, tmp_path: Path):
    with besieged(tmp_path, [writer(tiny_dir)]) as besieged_server:
        besieged_server.besiege(300, warm=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand(tiny_dir: Path, tmp_path: Path):
    """Of a server that writes, embeds and scores."""
    make_encoder(tmp_path / "cross", "Bert", "ForSequenceClassification", num_labels=1)
    models = [writer(tiny_dir), {**writer(tiny_dir), "served_model_name": ["embedder"], "runner": "pooling"},
              {"model": str(tmp_path / "cross"), "served_model_name": ["scorer"]}]
    with besieged(tmp_path, models) as besieged_server:
        besieged_server.besiege(10_000, warm=2000)
