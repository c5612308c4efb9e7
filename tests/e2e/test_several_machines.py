"""One server on two machines: the tokens of one process, and one end for all, whoever dies."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.markdown import blocks
from tests.support.greedy import Case, ask_server, differences, make_prompts, reference
from tests.support.machines import child_of, loopback_machines, network_machines, start_lines, start_nodes
from tests.support.server import ENGINE, WORKER, ServerProcess, poll
from tests.support.tiny_model import make_tiny_model
from xllm_npu.master.cluster.network import free_ports

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True}
NEW_TOKENS = 24
PREFIX = "xllm-npu: "


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory) -> Path:
    """Experts that data-parallel ranks share: they step together."""
    return make_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", num_experts=8, num_experts_per_tok=3,
                           moe_intermediate_size=48, norm_topk_prob=True, max_length=32768)


@pytest.fixture(scope="module")
def nodes(tiny_dir: Path, moe_dir: Path, tmp_path_factory) -> Iterator[dict[str, list[ServerProcess]]]:
    """Servers that tests end, all starting at the same time."""
    kinds = {"tp": (tiny_dir, "--tp-size", "2"), "dp": (moe_dir, "--dp-size", "2", "--ep-size", "2")}
    with ExitStack() as stack:
        yield {name: stack.enter_context(start_nodes(
            model, tmp_path_factory.mktemp(name), loopback_machines(), "--dtype", "float32", *flags))
            for name, (model, *flags) in kinds.items()}


@pytest.fixture(scope="module")
def cases(tiny_dir: Path) -> list[Case]:
    return cases_of(tiny_dir)


def cases_of(directory: Path) -> list[Case]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, 140, 32)]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return reference(model, prompts, NEW_TOKENS)


def answers(server: ServerProcess, cases: list[Case]) -> list[list[int]]:
    server.wait_ready()
    return ask_server(server.url, cases, NEW_TOKENS, uds=server.uds)


def last_line(server: ServerProcess) -> str:
    return server.stderr.splitlines()[-1]


def in_flight_when(server: ServerProcess, kill) -> str:
    """The error that a whole and a streamed request in flight end with, and the server's exit with it."""
    with server.client() as client, ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=ENDLESS)
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            assert '"text"' in next(lines)
            server.wait_running(2)
            kill()
            health = poll(lambda: (answer := client.get("/health")).status_code != 200 and answer, "a sick server")
            frames = [line for line in lines if line]
        body = whole.result()
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    errors = [body.json()["error"]["message"], json.loads(frames[-1].removeprefix("data: "))["error"]["message"]]
    assert errors[0] == errors[1]
    assert server.wait() == 1
    assert last_line(server) == f"{PREFIX}{errors[0]}"
    return errors[0]


def ended_together(agent: ServerProcess, sentence: str) -> None:
    assert agent.wait() == 1
    assert last_line(agent) == f"{PREFIX}{sentence}"
    agent.assert_nothing_left()


@pytest.mark.slow
def test_tensor_parallel_tokens_and_a_killed_worker(nodes, cases):
    server, agent = nodes["tp"]
    assert differences(cases, answers(server, cases)) == []
    worker = child_of(agent, WORKER)
    said = in_flight_when(server, worker.kill)
    assert said == (f"The engine stopped: The worker process of rank 1 (pid {worker.pid} on node 1) "
                    "was ended by SIGKILL.")
    ended_together(agent, f"The server stopped: {said.removeprefix('The engine stopped: ')}")


@pytest.mark.slow
def test_shared_experts_tokens_and_a_killed_engine(nodes, moe_dir):
    server, agent = nodes["dp"]
    cases = cases_of(moe_dir)
    assert differences(cases, answers(server, cases)) == []
    metrics = server.metrics()
    assert min(metrics[f"generation_tokens_total@{rank}"] for rank in (0, 1)) > 0
    engine = child_of(agent, ENGINE)
    server.alarms = server.alarms[1:]  # its own engine fails in a collective, and says where
    said = in_flight_when(server, engine.kill)
    assert said == (f"The engine stopped: The engine process of rank 1 (pid {engine.pid} on node 1) "
                    "was ended by SIGKILL.")
    ended_together(agent, f"The server stopped: {said.removeprefix('The engine stopped: ')}")


ELASTIC = ("--enable-vmm-kvcache", "--vmm-elastic", "--enable-vmm-weights", "--phy-page-granularity-size", "16KiB")


@pytest.mark.slow
def test_rules_11_to_13_virtual_memory_over_two_machines(tiny_dir, tmp_path, cases):
    """The other machine's rank maps pages with rank 0, gives them back with it, sleeps and wakes with it."""
    registry, admin_port = free_ports("127.0.0.1", 2)
    flags = ("--tp-size", "2", "--dtype", "float32", *ELASTIC, "--worker-memory-master-node-addr",
             f"127.0.0.1:{registry}")
    admin_flags = ("--admin-port", str(admin_port))
    with start_nodes(tiny_dir, tmp_path, loopback_machines(), *flags, more=(admin_flags, ())) as (server, agent):
        expected = answers(server, cases)
        assert differences(cases, expected) == []
        far = child_of(agent, WORKER).pid
        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "an idle cache")
        rest = page_bytes(far)
        with server.client() as client, client.stream("POST", COMPLETIONS, json={
                **ENDLESS, "max_tokens": 600, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            poll(lambda: page_bytes(far) > rest, "the far rank's pages to grow")
            list(lines)
        poll(lambda: page_bytes(far) == rest, "them to go back")
        with httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", timeout=60) as admin:
            assert admin.post("/sleep").status_code == 200
            assert page_bytes(far) == 0
            assert admin.post("/wake_up").status_code == 200
        assert page_bytes(far) == rest
        assert answers(server, cases) == expected


def page_bytes(pid: int) -> int:
    """Committed bytes of the file that a process's pages are pieces of."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if "xllm-npu-pages" in os.readlink(f"/proc/{pid}/fd/{fd}"):
            return os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512
    raise AssertionError("it has no virtual memory")


@pytest.mark.slow
def test_documented_lines_in_network_namespaces_and_a_clean_end(tiny_dir, tmp_path, cases):
    """What the document says, word for word but for the model, where addresses are real ones."""
    (block,) = [b for b in blocks("docs/parallelism.md") if b.info == ("bash", "nodes")]
    lines = [[*line.split()[3:], "--dtype", "float32"] for line in block.text.splitlines()]
    with network_machines() as machines, start_lines(tiny_dir, tmp_path, machines, lines) as (server, agent):
        assert differences(cases, answers(server, cases)) == []
        assert server.stop() == 0
        assert agent.wait() == 0


@pytest.mark.parametrize("victim", [
    "agent", *(pytest.param(victim, marks=pytest.mark.slow) for victim in ("server", "worker"))])
@pytest.mark.slow
def test_a_death_while_loading(tiny_dir, tmp_path, victim):
    with start_nodes(tiny_dir, tmp_path, loopback_machines(), "--tp-size", "2") as (server, agent):
        worker = child_of(agent, WORKER)
        engine = child_of(server, ENGINE)
        if victim == "server":
            server.send(signal.SIGKILL)
            assert agent.wait() == 1
            assert re.fullmatch(rf"{PREFIX}The master at 127.0.0.1:\d+ has ended or cannot be reached any more: "
                                "node 1 ends.", last_line(agent))
            assert server.wait() == -signal.SIGKILL
        elif victim == "agent":
            agent.send(signal.SIGKILL)
            assert server.wait() == 1
            assert re.fullmatch(rf"{PREFIX}Cannot start: Node 1 \(.*, 127.0.0.2\) has ended or cannot be reached any "
                                "more.", last_line(server))
        else:
            worker.kill()
            assert server.wait() == 1
            said = f"The worker process of rank 1 (pid {worker.pid} on node 1) was ended by SIGKILL."
            assert last_line(server) == f"{PREFIX}Cannot start: {said}"
            ended_together(agent, f"The server stopped: {said}")
        psutil.wait_procs([worker, engine], timeout=10)
        assert not worker.is_running()
        assert not engine.is_running()


def test_settings_that_differ_are_refused_on_both_sides(tiny_dir, tmp_path):
    more = (("--node-join-timeout", "10"), ("--max-seqs-per-batch", "8"))
    with start_nodes(tiny_dir, tmp_path, loopback_machines(), "--tp-size", "2", more=more) as (server, agent):
        assert agent.wait() == 1
        said = "Node 1 has --max-seqs-per-batch=8 and node 0 has --max-seqs-per-batch=64: give both the same."
        assert last_line(agent) == f"{PREFIX}{said}"
        assert f"refused 127.0.0.2: {said}" in server.stderr
        assert server.stop() == 0  # while it waits for another


def test_no_master(tiny_dir, tmp_path):
    flags = ("--nnodes", "2", "--tp-size", "2", "--node-rank", "1", "--master-node-addr", "127.0.0.1:1",
             "--node-join-timeout", "1")
    with ServerProcess(tiny_dir, tmp_path, *flags, ready=False) as agent:
        assert agent.wait() == 1
        assert last_line(agent).startswith(f"{PREFIX}Node 1 did not reach the master at 127.0.0.1:1 within 1 s")


@pytest.mark.slow
def test_two_copies_of_two_ranks_on_two_machines(tiny_dir, tmp_path, cases):
    flags = ("--tp-size", "2", "--dp-size", "2", "--dtype", "float32")
    with start_nodes(tiny_dir, tmp_path, loopback_machines(), *flags) as (server, _):
        assert differences(cases, answers(server, cases)) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_started_again_on_the_same_machines(tiny_dir, tmp_path, cases, victim):
    """A worker dies, or a whole machine, which comes back when its command is given again."""
    flags = ("--tp-size", "2", "--dtype", "float32", "--restart-on-failure")
    with start_nodes(tiny_dir, tmp_path, loopback_machines(), *flags) as (server, agent):
        assert differences(cases, answers(server, cases)) == []
        with server.client() as client:
            if victim == "worker":
                child_of(agent, WORKER).kill()
            else:
                agent.send(signal.SIGKILL)
                agent.wait()
            poll(lambda: client.get("/health").status_code == 503, "the failure to be noticed")
        if victim == "agent":
            agent.__enter__()
        assert differences(cases, answers(server, cases)) == []
        assert server.stop() == 0
        assert agent.wait() == 0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_smollm2_over_two_machines(tmp_path):
    from xllm_models.hub import resolve_model

    path = resolve_model("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cases = reference(model, make_prompts(AutoTokenizer.from_pretrained(path), 6, 120), 16)
    with start_nodes("smollm2", tmp_path, loopback_machines(), "--dp-size", "2", "--dtype", "float32",
                     "--max-cache-size", "200MiB") as (server, _):
        server.wait_ready()
        assert differences(cases, ask_server(server.url, cases, 16, uds=server.uds)) == []


@pytest.mark.slow
def test_weights_are_replaced_on_both_machines(tiny_dir, tmp_path, cases):
    """And a checkpoint that the other one cannot read is refused."""
    new = make_tiny_model(tmp_path / "new", seed=7, max_length=32768)
    port = free_ports("127.0.0.1", 1)[0]
    with (
        start_nodes(tiny_dir, tmp_path / "nodes", loopback_machines(), "--dtype", "float32", "--tp-size", "2",
                    more=(("--admin-port", str(port)), ())) as (server, _),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as admin,
    ):
        assert differences(cases, answers(server, cases)) == []
        assert admin.get("/get_world_size").json() == {"world_size": 2}
        refused = admin.post("/update_weights", json={"path": str(tmp_path / "nowhere")})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_checkpoint")
        reply = admin.post("/update_weights", json={"path": str(new)})
        assert reply.status_code == 200, reply.text
        other = cases_of(new)
        assert differences(other, answers(server, other)) == []
