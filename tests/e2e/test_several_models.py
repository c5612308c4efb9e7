"""Two models in one server: each answers under its name, and lives and dies by itself."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.server import ENGINE, ServerProcess, poll
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.multiprocess

PROMPT = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    return make_tiny_model(directory / "alpha"), make_tiny_model(directory / "beta", seed=5, max_length=512)


def text(client: httpx.Client, model: str | None) -> str:
    reply = client.post("/v1/completions", json={**PROMPT, "model": model})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model or model is None
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.slow
def test_each_answers_under_its_name_as_if_alone(models, tmp_path: Path):
    alone = []
    for model in models:
        with ServerProcess(model, tmp_path / model.name) as server, server.client() as client:
            alone.append(text(client, model.name))
    assert alone[0] != alone[1]
    with ServerProcess(models[0], tmp_path / "both", str(models[1])) as server, server.client() as client:
        assert [text(client, name) for name in ("alpha", "beta", None)] == [*alone, alone[0]]
        unknown = client.post("/v1/completions", json={**PROMPT, "model": "gamma"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("alpha", 1024), ("beta", 512)]
        assert client.get("/v1/models/beta").json() == cards[1]
        tokenized = client.post("/tokenize", json={"prompt": "a", "model": "beta"}).json()
        assert tokenized["max_model_len"] == 512
        samples = client.get("/metrics").text.splitlines()
        for name, count in (("alpha", 2), ("beta", 1)):
            labels = f'engine="0",finished_reason="length",model_name="{name}"'
            assert f"xllm_npu:request_success_total{{{labels}}} {count}.0" in samples
        assert samples.count("# TYPE xllm_npu:request_success_total counter") == 1


@pytest.mark.slow
def test_one_dies_and_the_other_serves_on(models, tmp_path: Path):
    with ServerProcess(models[0], tmp_path, str(models[1])) as server, server.client() as client:
        before = text(client, "alpha")
        os.kill(server.children_of_kind(ENGINE, 2)[1], signal.SIGKILL)
        poll(lambda: client.get("/health").status_code == 503, "an unhealthy server")
        poll(lambda: "'beta' has stopped" in client.get("/health").text, "the cause")
        dead = client.post("/v1/completions", json={**PROMPT, "model": "beta"})
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
        assert text(client, "alpha") == before
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["alpha"]
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == 1


@pytest.mark.slow
def test_a_model_is_restarted_alone(models, tmp_path: Path):
    flags = (str(models[1]), "--restart-on-failure")
    with ServerProcess(models[0], tmp_path, *flags) as server, server.client() as client:
        before = text(client, "beta")
        alpha, beta = server.children_of_kind(ENGINE, 2)
        os.kill(beta, signal.SIGKILL)
        poll(lambda: client.get("/health").status_code == 503, "an unhealthy server")
        assert text(client, "alpha")
        server.wait_ready()
        assert text(client, "beta") == before
        assert alpha in server.children_of_kind(ENGINE, 2)


@pytest.mark.slow
def test_settings_of_one_model_and_a_second_ctrl_c(models, tmp_path: Path):
    """The file's entry wins over the flags of all models."""
    file = tmp_path / "several.json"
    file.write_text(json.dumps({"models": [
        str(models[0]), {"model": str(models[1]), "served_model_name": ["two", "zwei"], "kv_cache": {"block_size": 32}},
    ]}))
    with ServerProcess.of_file(file, tmp_path / "run") as server, server.client() as client:
        assert text(client, "two") == text(client, "zwei")
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["alpha", "two", "zwei"]
        assert re.findall(r'config_info{block_size="(\d+)",engine="0",model_name="(\w+)"',
                          client.get("/metrics").text) == [("16", "alpha"), ("32", "two")]
        with client.stream("POST", "/v1/completions", json={
                **PROMPT, "model": "two", "max_tokens": 400, "ignore_eos": True, "stream": True}) as stream:
            lines = stream.iter_lines()  # whose end would be the client's
            assert next(lines)
            server.send(signal.SIGINT)
            poll(lambda: "finishing 1 requests" in server.stderr, "the drain")
            server.send(signal.SIGINT)
            assert server.wait() == 130


@pytest.mark.slow
def test_a_model_that_cannot_start_ends_the_server_and_is_named(models, tmp_path: Path):
    missing = tmp_path / "nothing" / "here"
    with ServerProcess(models[0], tmp_path, str(missing), ready=False) as server:
        assert server.wait(60) == 1
        assert f"Cannot start ({missing}): There is no directory" in server.stderr
