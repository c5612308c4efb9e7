"""Models that share less memory than they need together: asleep, woken up by requests, making room for each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from xllm_models.hub import resolve_model

from tests.e2e.test_elastic_kv import resident
from tests.support.server import DEADLINE, ENGINE, ServerProcess, poll
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.multiprocess

MIB = 2**20
VIRTUAL = ("--enable-vmm-weights", "--enable-vmm-kvcache", "--vmm-elastic", "--phy-page-granularity-size", "64KiB")
MAKING_ROOM = (*VIRTUAL, "--auto-wakeup", "--evict-idle-models")
WEIGHT_BYTES = 9.5 * MIB  # of each of the two
BYTES_PER_TOKEN = 4096  # four layers, K and V, two heads of 64, float32
LONG = 980  # tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    shape = {"hidden": 256, "layers": 4}
    return make_tiny_model(directory / "alpha", **shape), make_tiny_model(directory / "beta", seed=5, **shape)


class Pair:
    """Both models in one server, its API on a Unix socket, its admin routes on a port."""

    def __init__(self, server: ServerProcess, port: int, api: httpx.Client, admin: httpx.Client) -> None:
        self.server, self.port, self.api, self.admin = server, port, api, admin

    def ask(self, model: str, tokens: int = 5, max_tokens: int = 8) -> httpx.Response:
        """A prompt of one letter; every length is another prompt."""
        return self.api.post("/v1/completions", json={
            "model": model, "prompt": [65] * tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})

    def text(self, model: str, tokens: int = 5, max_tokens: int = 8) -> str:
        reply = self.ask(model, tokens, max_tokens)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def weight_bytes(self, model: int) -> int:
        """Mapped, as the status says."""
        info = self.admin.get("/status").json()["models"][model]["virtual_memory_info"]
        return int(info["owners"]["weights"]["bytes"])

    def do(self, path: str) -> None:
        reply = self.admin.post(path)
        assert reply.status_code == 200, reply.text

    def states(self) -> list[str]:
        return [model["state"] for model in self.admin.get("/status").json()["models"]]

    def shared_bytes(self) -> int:
        """Resident in both engines."""
        return sum(resident(pid)[0] for pid in self.server.children_of_kind(ENGINE, 2))


@contextlib.contextmanager
def both(models: tuple[Path, Path], directory: Path, *flags: str) -> Iterator[Pair]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        ServerProcess(models[0], directory, str(models[1]), "--admin-port", str(port), *flags, uds=True) as server,
        server.client() as api, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as admin,
    ):
        yield Pair(server, port, api, admin)


@pytest.fixture(scope="module")
def roomy(models, tmp_path_factory) -> Iterator[Pair]:
    """Memory for all. Tests leave both models awake."""
    with both(models, tmp_path_factory.mktemp("roomy"), *VIRTUAL, "--max-cache-size", "64MiB") as pair:
        yield pair


@pytest.fixture(scope="module")
def expected(roomy: Pair) -> dict[tuple[str, int], str]:
    return {(name, tokens): roomy.text(name, tokens) for name in ("alpha", "beta") for tokens in (5, 6, LONG)}


def test_the_admin_routes_have_a_listener_of_their_own(roomy: Pair):
    assert roomy.api.post("/sleep").status_code == 404
    assert roomy.admin.post("/v1/completions").status_code == 404
    assert f"Admin routes at: http://127.0.0.1:{roomy.port}" in roomy.server.stderr


def test_a_taken_admin_port_is_told_at_once(models, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with ServerProcess(models[0], tmp_path, "--admin-port", port, ready=False) as server:
            assert server.wait() == 1
            assert f"Port {port} on 127.0.0.1 is in use" in server.stderr
            assert "choose another --admin-port" in server.stderr


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sleeping_model_gives_memory_back_and_refuses(roomy: Pair, expected, level: int):
    awake = roomy.shared_bytes()
    roomy.do(f"/sleep?model=alpha&level={level}")
    assert awake - roomy.shared_bytes() > 0.95 * WEIGHT_BYTES
    assert roomy.weight_bytes(0) == 0
    assert roomy.weight_bytes(1) > WEIGHT_BYTES
    refused = roomy.ask("alpha")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_sleeping")
    assert "retry-after" in refused.headers
    assert roomy.api.get("/health").status_code == 200
    assert roomy.text("beta") == expected["beta", 5]
    roomy.do("/wake_up?model=alpha&tags=weights")
    assert roomy.ask("alpha").status_code == 503
    roomy.do("/wake_up?model=alpha&tags=kv_cache")
    assert roomy.text("alpha") == expected["alpha", 5]
    assert 'engine_sleep_state{model_name="alpha",sleep_state="awake"} 1.0' in roomy.api.get("/metrics").text


def test_a_paused_model_lets_requests_wait(roomy: Pair, expected):
    roomy.do("/pause?model=alpha&mode=keep")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(roomy.text, "alpha")
        poll(lambda: roomy.server.metrics()["num_requests_waiting"] == 1, "a waiting request")
        assert roomy.text("beta") == expected["beta", 5]
        assert not waiting.done()
        roomy.do("/resume?model=alpha")
        assert waiting.result(DEADLINE) == expected["alpha", 5]


def test_done_when_2_two_models_serve_alternately_within_one_budget(models, expected, tmp_path: Path):
    """Not even their weights fit together. The budget holds at every moment, for what is really resident."""
    budget = 16 * MIB
    assert WEIGHT_BYTES + LONG * BYTES_PER_TOKEN < budget < 2 * WEIGHT_BYTES
    with both(models, tmp_path, *MAKING_ROOM, "--max-cache-size", str(budget)) as pair:
        assert pair.states() == ["sleeping", "awake"]  # the second found room at start because the first made it
        for name in ("alpha", "beta"):
            pair.do(f"/sleep?model={name}")
        least, most, over = pair.shared_bytes(), 0, threading.Event()

        def measure() -> int:
            highest = 0
            while not over.wait(0.002):
                highest = max(highest, pair.shared_bytes())
            return highest

        with ThreadPoolExecutor(5) as pool:
            measured = pool.submit(measure)
            for name in ("alpha", "beta"):
                for tokens in (5, LONG):
                    assert pair.text(name, tokens) == expected[name, tokens]
                assert pair.states() == [("sleeping", "awake")[name == own] for own in ("alpha", "beta")]
            # and at once: each finishes what it has begun, then makes room
            asks = [(name, tokens, pool.submit(pair.text, name, tokens)) for _ in range(2)
                    for name in ("alpha", "beta") for tokens in (5, 6)]
            for name, tokens, ask in asks:
                assert ask.result(DEADLINE) == expected[name, tokens]
            over.set()
            most = measured.result(DEADLINE)
        assert WEIGHT_BYTES + LONG * BYTES_PER_TOKEN < most - least <= budget
        assert pair.server.metrics()["request_success_total:length"] == 12


@pytest.mark.slow
def test_a_long_request_gets_the_memory_of_an_idle_model(models, expected, tmp_path: Path):
    """The weights of both fit, and beside them not the KV of a long request."""
    budget = 22 * MIB
    assert budget < 2 * WEIGHT_BYTES + LONG * BYTES_PER_TOKEN
    with both(models, tmp_path, *MAKING_ROOM, "--max-cache-size", str(budget)) as pair:
        assert pair.states() == ["awake", "awake"]
        for name, states in (("alpha", ["awake", "sleeping"]), ("beta", ["sleeping", "awake"])):
            assert pair.text("alpha") == expected["alpha", 5]
            assert pair.text("beta") == expected["beta", 5]
            assert pair.states() == ["awake", "awake"]
            assert pair.text(name, LONG) == expected[name, LONG]
            assert pair.states() == states


@pytest.mark.slow
def test_done_when_5_requests_that_leave_and_operators_that_interfere(models, expected, tmp_path: Path):
    """All at once, in an order that a seed gives: nothing hangs, nothing is left, and what is whole is right."""
    draw = random.Random(0)
    with both(models, tmp_path, *MAKING_ROOM, "--max-cache-size", "16MiB") as pair:

        def act(kind: str, name: str, tokens: int, option: str) -> None:
            if kind == "leave":
                body = {"model": name, "prompt": [65] * tokens, "max_tokens": 200, "ignore_eos": True, "stream": True}
                with pair.api.stream("POST", "/v1/completions", json=body) as stream:
                    if stream.status_code == 200:
                        next(stream.iter_lines())
            elif kind == "ask":
                reply = pair.ask(name, tokens)
                if reply.status_code == 503:  # an operator was faster
                    assert reply.json()["error"]["code"] in ("model_sleeping", "insufficient_memory"), reply.text
                elif (choice := reply.json()["choices"][0])["finish_reason"] != "abort":
                    assert choice["text"] == expected[name, tokens]
            else:
                reply = pair.admin.post(f"/{kind}?model={name}&{option}")
                assert reply.status_code in (200, 503), reply.text  # 503: the other one works and needs its memory

        with ThreadPoolExecutor(8) as pool:
            kinds = ["ask"] * 6 + ["leave"] * 2 + ["sleep", "wake_up"]
            actions = [pool.submit(act, draw.choice(kinds), draw.choice(["alpha", "beta"]), draw.choice([5, 6, LONG]),
                                   f"mode={draw.choice(['abort', 'wait', 'keep'])}") for _ in range(80)]
            for action in actions:
                action.result(120)
        for name in ("alpha", "beta"):
            assert pair.text(name) == expected[name, 5]
        poll(lambda: [m["requests"] for m in pair.admin.get("/status").json()["models"]] == [0, 0], "no request")
        pair.server.wait_idle()


@pytest.mark.slow
def test_one_that_dies_asleep_is_restarted_asleep(models, expected, tmp_path: Path):
    with both(models, tmp_path, *MAKING_ROOM, "--max-cache-size", "64MiB", "--restart-on-failure") as pair:
        pair.do("/sleep?model=beta")
        os.kill(pair.server.children_of_kind(ENGINE, 2)[1], signal.SIGKILL)
        poll(lambda: pair.api.get("/health").status_code == 503, "an unhealthy server")
        pair.server.wait_ready()
        poll(lambda: pair.states() == ["awake", "sleeping"], "it sleeps again")
        assert pair.text("beta") == expected["beta", 5]


@pytest.mark.slow
def test_one_that_dies_gets_its_memory_back(models, expected, tmp_path: Path):
    """Another model, which waited for it to be idle, has taken it meanwhile."""
    flags = (*MAKING_ROOM, "--max-cache-size", "16MiB", "--restart-on-failure")
    with both(models, tmp_path, *flags) as pair, ThreadPoolExecutor(2) as pool:
        assert pair.text("alpha") == expected["alpha", 5]
        pool.submit(pair.ask, "alpha", 5, 900)
        pair.server.wait_running(1)
        waiting = pool.submit(pair.text, "beta")
        poll(lambda: pair.server.metrics().get("residency_transition_failures_total:memory:wake"), "a refused wake-up")
        os.kill(pair.server.children_of_kind(ENGINE, 2)[0], signal.SIGKILL)
        assert waiting.result(DEADLINE) == expected["beta", 5]
        pair.server.wait_ready()
        assert pair.text("alpha") == expected["alpha", 5]
        assert pair.states() == ["awake", "sleeping"]


@pytest.mark.slow
def test_models_over_several_ranks(models, expected, tmp_path: Path):
    """One shares its weights among two ranks, the other has them twice. The budget is each rank's, on one machine."""
    file = tmp_path / "several.json"
    file.write_text(json.dumps({"models": [{"model": str(models[0]), "tp_size": 2},
                                           {"model": str(models[1]), "dp_size": 2}]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert 26 * MIB < 3 * WEIGHT_BYTES
    flags = (*MAKING_ROOM, "--max-cache-size", "13MiB", "--admin-port", str(port))
    with (
        ServerProcess.of_file(file, tmp_path / "run", *flags, uds=True) as server, server.client() as api,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as admin,
    ):
        pair = Pair(server, port, api, admin)
        for _ in range(2):
            for name in ("alpha", "beta"):
                assert pair.text(name) == expected[name, 5]
                assert pair.text(name, 6) == expected[name, 6]
                assert pair.states() == [("sleeping", "awake")[name == own] for own in ("alpha", "beta")]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_twice_with_the_memory_of_one(tmp_path: Path):
    """And a third time, as a fork that shares the weights of the second."""
    directory = resolve_model("smollm2").path
    flags = ("--dtype", "float32", "--served-model-name", "alpha,beta", "--max-model-len", "1024", "--max-cache-size",
             "700MiB", "--phy-page-granularity-size", "256KiB", "--block-size", "128")
    body = {"temperature": 0, "max_tokens": 10,
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    with both((directory, directory), tmp_path, *MAKING_ROOM, *flags) as pair:

        def answer(name: str) -> str:
            reply = pair.api.post("/v1/chat/completions", json={**body, "model": name}, timeout=200)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["message"]["content"])

        for name, states in (("alpha", ["awake", "sleeping"]), ("beta", ["sleeping", "awake"]),
                             ("alpha", ["awake", "sleeping"]), ("beta", ["sleeping", "awake"])):
            assert answer(name) == "The capital of Japan is Tokyo."
            assert pair.states() == states
        fork = pair.admin.post("/fork_master", json={"model_id": "gamma", "model": "beta"}, timeout=200)
        assert fork.status_code == 200, fork.text
        assert answer("gamma") == answer("beta") == "The capital of Japan is Tokyo."
        assert pair.states() == ["sleeping", "awake", "awake"]
