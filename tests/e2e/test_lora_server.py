"""Adapters of a running server with two data-parallel ranks: loaded, replaced and unloaded under requests, and after a
restart of its engines.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.lora import make_adapter, merged_answers
from tests.support.server import ServerProcess, poll
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROMPT, LONG = [5, 6, 7, 8] * 6, 400
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, list[Path], list[list[int]]]:
    """A model, adapters, and the answers of the model and of each adapter."""
    directory = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(directory / "model")
    adapters = [make_adapter(directory / f"adapter{seed}", model, seed=seed) for seed in (1, 2, 3)]
    return model, adapters, [merged_answers(model, adapter, [PROMPT], 12)[0] for adapter in (None, *adapters)]


@pytest.fixture(scope="module")
def server(made, tmp_path_factory) -> Iterator[ServerProcess]:
    model, adapters, _ = made
    with ServerProcess(model, tmp_path_factory.mktemp("server"), "--enable-lora", "--lora-modules",
                       f"one={adapters[0]}", "--max-loras", "2", "--allow-runtime-lora-updating", "--dp-size", "2",
                       "--dtype", "float32", "--restart-on-failure") as started:
        yield started


def ask(client: httpx.Client, name: str, max_tokens: int = 12) -> list[int]:
    reply = client.post("/v1/completions", json=request(name, max_tokens))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def request(name: str, max_tokens: int = 12) -> dict:
    return {"model": name, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True}


def streamed_tokens(line: str) -> list[int]:
    return (json.loads(line[6:])["choices"] or [{}])[0].get("token_ids") or []


def load(client: httpx.Client, name: str, path: Path, **more) -> httpx.Response:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more})


def test_an_adapter_is_replaced_and_unloaded_under_its_requests(server, made):
    _, adapters, answers = made
    with server.client() as client, ThreadPoolExecutor() as pool:
        assert load(client, "two", adapters[1]).status_code == 200
        names = ["model", "one", "two"] * 4
        assert list(pool.map(lambda name: ask(client, name), names)) == answers[:3] * 4
        with client.stream("POST", "/v1/completions", json={**request("two", LONG), "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            tokens = streamed_tokens(next(lines))
            assert load(client, "two", adapters[2], load_inplace=True).status_code == 200
            assert ask(client, "two") == answers[3]  # the same prompt, and not the cached KV of the old one
            assert client.post(UNLOAD, json={"lora_name": "two"}).status_code == 200
            assert client.post("/v1/completions", json=request("two")).status_code == 404
            for line in lines:
                tokens += streamed_tokens(line)
        assert len(tokens) == LONG
        assert tokens[:12] == answers[2]


def test_engines_that_are_started_again_have_them(server, made):
    _, adapters, answers = made
    with server.client() as client:
        assert load(client, "late", adapters[1]).status_code == 200
        psutil.Process(server.engine_pid).send_signal(signal.SIGKILL)
        poll(lambda: client.get("/health").status_code == 503, "the end to be noticed")
        poll(lambda: client.get("/health").status_code == 200, "the engines to come back", 60)
        assert [ask(client, name) for name in ("model", "one", "late")] == answers[:3]
        assert [ask(client, name) for name in ("late", "one", "model")] == answers[2::-1]


def test_a_bad_directory_is_refused_and_leaves_nothing(server, made, tmp_path):
    model, _, answers = made
    bad = make_adapter(tmp_path / "bad", model, rank=32)
    with server.client() as client:
        reply = load(client, "bad", bad)
        assert reply.status_code == 400
        assert "--max_lora_rank" in reply.json()["error"]["message"]
        assert str(tmp_path) not in reply.text
        assert "bad" not in [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert ask(client, "one") == answers[1]


def test_one_that_cannot_be_loaded_at_the_start_ends_the_server(made, tmp_path):
    model, _, _ = made
    with ServerProcess(model, tmp_path, "--enable-lora", "--lora-modules", f"one={tmp_path}", ready=False) as server:
        assert server.wait() == 1
        assert "The adapter one cannot be loaded: The directory has no adapter_config.json." in server.stderr
