"""Two engine processes behind one HTTP process: the same tokens, requests on both, and one end for all."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.docs.markdown import launch_flags
from tests.support.greedy import ask_server, differences, reference
from tests.support.server import ENGINE, ServerProcess, poll

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True}
NEW_TOKENS = 24


def two_engines(tiny_dir: Path, directory: Path, *more: str) -> ServerProcess:
    copies = launch_flags("docs/parallelism.md", "copies", 0)
    return ServerProcess(tiny_dir, directory, *copies, "--dtype", "float32", *more)


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("shared")
    with two_engines(tiny_dir, directory, "--enable-prefix-cache-aware-dp-routing") as shared:
        yield shared


@pytest.fixture(scope="module")
def cases(tiny_dir: Path):
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 256, 60).tolist()
    prompts = [(shared if i % 3 == 0 else []) + rng.integers(0, 256, int(n)).tolist()
               for i, n in enumerate(np.geomspace(1, 140, 48))]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32, attn_implementation="eager")
    return reference(model, prompts, NEW_TOKENS)


def test_tokens_are_those_of_one_process_and_both_ranks_work(server, cases):
    assert differences(cases, ask_server(server.url, cases, NEW_TOKENS)) == []
    server.wait_idle()
    metrics = server.metrics()
    total = len(cases) * NEW_TOKENS
    ranks = [metrics[f"generation_tokens_total@{rank}"] for rank in (0, 1)]
    assert sum(ranks) == metrics["generation_tokens_total"] == sum(len(c.expected) for c in cases) <= total
    assert min(ranks) > 0.25 * sum(ranks)


def test_a_prompt_goes_where_its_beginning_is(server):
    before = server.metrics()
    hits = "prefix_cache_hits_total"
    prompts = [[7 * i % 251 for i in range(start, start + 64)] for start in (0, 1000)]
    with server.client() as client:
        for turn in range(4):  # one at a time, so both ranks are always equally empty
            for prompt in prompts:
                body = {"prompt": prompt + [turn] * 8, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
                assert client.post(COMPLETIONS, json=body).status_code == 200
    after = server.metrics()
    assert after[hits] - before[hits] == 2 * 3 * 64


@pytest.mark.slow
def test_clients_that_leave_free_both_ranks(server):
    before = server.metrics()["request_success_total:abort"]
    with server.client() as client:
        streams = []
        for count in range(1, 5):
            stream = client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True})
            streams.append((stream, stream.__enter__()))
            server.wait_running(count)
        metrics = server.metrics()
        # Not always two each: one that has run for long takes as much memory as two that came later.
        assert all(metrics[f"num_requests_running@{rank}"] for rank in (0, 1))
        for stream, _ in streams:
            stream.__exit__(None, None, None)
    poll(lambda: server.metrics()["request_success_total:abort"] == before + 4, "four aborts")
    server.wait_idle()


@pytest.mark.slow
def test_one_engine_dies_and_all_end(tiny_dir: Path, tmp_path: Path):
    with two_engines(tiny_dir, tmp_path) as server:
        one_engine_dies_and_all_end(server)


def one_engine_dies_and_all_end(server: ServerProcess) -> None:
    engines = server.children_of_kind(ENGINE, 2)
    with server.client() as client, ThreadPoolExecutor() as pool:
        whole = [pool.submit(client.post, COMPLETIONS, json=ENDLESS) for _ in range(2)]
        server.wait_running(2)
        metrics = server.metrics()
        assert [metrics[f"num_requests_running@{rank}"] for rank in (0, 1)] == [1, 1]
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            assert '"text"' in next(lines)
            psutil.Process(engines[1]).send_signal(signal.SIGKILL)
            health = poll(lambda: (answer := client.get("/health")).status_code != 200 and answer, "a sick server")
            frames = [line for line in lines if line]
        bodies = [answer.result() for answer in whole]
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    said = f"(pid {engines[1]}) was ended by SIGKILL."
    for error in [json.loads(frames[-1].removeprefix("data: ")), *(body.json() for body in bodies)]:
        assert said in error["error"]["message"]
    assert server.wait() == 1
    last = server.stderr.splitlines()[-1]
    assert last.startswith("xllm-npu: The engine stopped: The engine process of rank ")
    assert last.endswith(said)
    server.assert_nothing_left()
