"""A Ray cluster of two nodes on this machine: the tokens of one process, and nothing left in the cluster afterwards."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.docs.markdown import blocks
from tests.support import spread_models
from tests.support.greedy import ask_server, differences, reference
from tests.support.server import ENGINE, WORKER, ServerProcess, poll
from tests.support.spread_models import SpreadModels, tight

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess]
ray = pytest.importorskip("ray", reason="needs the extra [ray]")

NEW_TOKENS = 16
FLAGS = ("--tp-size", "2", "--placement", "ray", "--platform", "cpu", "--dtype", "float32")
MARK, OURS = "XLLM_TEST_RAY", str(os.getpid())  # an environment variable that the cluster's processes inherit
CORES = 2  # of each node of the cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes; this process joins it to look around."""
    from ray.cluster_utils import Cluster

    # Its nodes import our packages as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ[MARK] = OURS
    os.environ |= {"RAY_TMPDIR": "/tmp", "TMPDIR": tempfile.mkdtemp(prefix="xray-")}  # paths of sockets are short
    made = Cluster(initialize_head=True, head_node_args={
        "num_cpus": CORES, "include_dashboard": False, "object_store_memory": 80 * 2**20})
    made.add_node(num_cpus=CORES, object_store_memory=80 * 2**20)
    os.environ["RAY_ADDRESS"] = made.address
    ray.init(made.address, log_to_driver=False)
    yield made.address
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", MARK):
        del os.environ[name]
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(os.environ.pop("TMPDIR"), ignore_errors=True)


@pytest.fixture(scope="module")
def cases(tiny_dir: Path):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, 140, 16)]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32, attn_implementation="eager")
    return reference(model, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SpreadModels:
    return SpreadModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def serve(cluster, tiny_dir, tmp_path) -> Callable[..., ServerProcess]:
    return lambda *flags: ServerProcess(tiny_dir, tmp_path, *(flags or FLAGS), ready=False, uds=True)


def agents() -> list[psutil.Process]:
    """Processes of Ray actors that run an agent, and what these have started; none of anybody else."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if any(name in words for name in ("AgentActor", WORKER, ENGINE)) and process.environ().get(MARK) == OURS:
                found.append(process)
    return found


def everything_is_given_back() -> bool:
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    left = list(Path(os.environ["TMPDIR"]).glob("xllm-npu-*"))
    return ray.available_resources().get("CPU") == 2 * CORES and not groups and not agents() and not left


def test_tokens_and_a_clean_end(serve, cases):
    (block,) = [b for b in blocks("docs/parallelism.md") if b.info == ("bash", "ray")]
    words = block.text.split()
    with serve(*words[3:], "--platform", "cpu", "--dtype", "float32") as server:
        server.wait_ready()
        assert differences(cases, ask_server(server.url, cases, NEW_TOKENS, uds=server.uds)) == []
        assert len(agents()) >= 4  # two actors, an engine, a worker
        assert server.stop() == 0
    poll(everything_is_given_back, "the cluster to have everything back")


@pytest.mark.parametrize(("name", "flags"), [
    ("qwen3", ("--dp-size", "2")), ("qwen3_moe", ("--tp-size", "2", "--ep-size", "2")),
    ("deepseek_v3", ("--dp-size", "2", "--ep-size", "2")),
])
def test_models_of_every_kind(cluster, models, tmp_path, name, flags):
    directory, cases = models.tiny(name)
    flags = (*tight(name, flags), "--placement", "ray", "--platform", "cpu")
    with ServerProcess(directory, tmp_path, *flags, ready=False, uds=True) as server:
        server.wait_ready()
        assert differences(cases, ask_server(server.url, cases, spread_models.NEW_TOKENS, uds=server.uds)) == []
        assert server.metrics()["num_preemptions_total"] > 0
    poll(everything_is_given_back, "the cluster to have everything back")


@pytest.mark.parametrize("victim", ["server", "actor", "driver"])
def test_a_death_ends_all(serve, victim):
    with serve() as server:
        server.wait_ready()
        if victim == "server":
            server.send(signal.SIGKILL)
        else:
            name = "AgentActor" if victim == "actor" else "ray_driver"
            processes = agents() if victim == "actor" else server.tree()
            next(p for p in processes if name in " ".join(p.cmdline())).kill()
            assert server.wait() == 1
            assert re.search(r"[Nn]ode \d|Ray driver process", server.stderr.splitlines()[-1])
        server.wait()
    poll(everything_is_given_back, "the cluster to have everything back")


def test_too_little_room(serve):
    with serve("--tp-size", "64", *FLAGS[2:], "--node-join-timeout", "2") as server:
        assert server.wait() == 1
        assert "64 actors with 1 CPU each are needed, and Ray's cluster has 4 CPU" in server.stderr.splitlines()[-1]
    poll(everything_is_given_back, "the cluster to have everything back")


def test_no_cluster(serve, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with serve() as server:
        assert server.wait() == 1
        assert "No Ray cluster can be connected to" in server.stderr.splitlines()[-1]


def test_nothing_of_ray_is_needed_elsewhere():
    code = "import sys, xllm_npu.master.cluster.cluster, xllm_npu.service.server; assert 'ray' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
