"""Data-parallel ranks of a mixture-of-experts model: each holds a part of the experts, and all step together."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.docs.markdown import launch_flags
from tests.support.greedy import ask_server, differences, reference
from tests.support.server import ENGINE, ServerProcess, poll
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 160, "ignore_eos": True}
NEW_TOKENS = 24
# 2 layers * 2 (K, V) * 2 heads * 16 * 4 bytes * 16 tokens: 8 KiB a block
FLAGS = {
    "experts shared, small cache": (
        "--max-model-len", "176", "--max-cache-size", str(14 * 8192),
        "--prefill-scheduling-memory-usage-threshold", "1.0", "--max-tokens-per-chunk-for-prefill", "24",
        "--max-tokens-per-batch", "64"),
    "rows exchanged, without overlap": ("--expert-parallel-degree", "2", "--enable-schedule-overlap=false"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, cases)"""
    directory = make_tiny_model(tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", max_position_embeddings=512)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, 140, 32)]
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return directory, reference(network, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory) -> Iterator[Callable[[str], ServerProcess]]:
    """By name of their flags, each started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(ServerProcess(
            model[0], tmp_path_factory.mktemp("server"), *launch_flags("docs/parallelism.md", "copies", 1),
            "--dtype", "float32", *FLAGS[name], ready=False)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_tokens_are_those_of_one_process(servers, model, name):
    server, (_, cases) = servers(name), model
    server.wait_ready()
    for count in (len(cases), 1, 2):  # all idle in between; with one request the other rank runs empty steps
        assert differences(cases[:count], ask_server(server.url, cases[:count], NEW_TOKENS)) == []
        server.wait_idle()
    metrics = server.metrics()
    ranks = [metrics[f"generation_tokens_total@{rank}"] for rank in (0, 1)]
    assert min(ranks) > 0.25 * sum(ranks)
    if "small" in name:
        assert metrics["num_preemptions_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_one_dies_in_the_middle_of_a_wave(servers, name):
    """Last: it ends the server. The other rank waits in a collective, and must not be blamed."""
    server = servers(name)
    server.wait_ready()
    engines = server.children_of_kind(ENGINE, 2)
    with server.client() as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, COMPLETIONS, json=LONG)
        server.wait_running(1)
        psutil.Process(engines[1]).send_signal(signal.SIGKILL)
        health = poll(lambda: (reply := client.get("/health")).status_code != 200 and reply, "a sick server")
        said = f"(pid {engines[1]}) was ended by SIGKILL."
        assert said in answer.result().json()["error"]["message"]
    assert health.status_code == 503
    assert server.wait() == 1
    last = server.stderr.splitlines()[-1]
    assert last.startswith("xllm-npu: The engine stopped: The engine process of rank ")
    assert last.endswith(said)
    server.assert_nothing_left()
