"""Ray as a way to start agents, without Ray: orders, order of machines, what is said when it cannot be had."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster.cluster_master import ClusterError
from xllm_npu.master.cluster.ray_driver import Driver, Place
from xllm_npu.master.cluster.ray_placement import RayPlacement

PLACE = Place(settings="{}", secret="s", master="10.0.0.9:1", count=4, cores=2, timeout=5)


class FakeRay(ModuleType):
    """Nodes a and b with two bundles each, interleaved; this process is on b."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.started: list[tuple] = []
        self.killed: list[object] = []
        self.removed: list[object] = []
        self.util = SimpleNamespace(
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "a", 1: "b", 2: "a", 3: "b"}},
            remove_placement_group=self.removed.append)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "b")

    def remote(self, kind):
        def options(scheduling_strategy, **given):
            def run(*words):
                self.started.append((scheduling_strategy, given, words))
                return len(self.started)

            return SimpleNamespace(remote=lambda: SimpleNamespace(run=SimpleNamespace(remote=run)))

        return SimpleNamespace(options=options)

    def cluster_resources(self):
        return {"NPU": 3.0}

    def available_resources(self):
        return {}

    def is_initialized(self):
        return True

    def kill(self, actor):
        self.killed.append(actor)

    def shutdown(self):
        pass


@pytest.fixture
def driver(monkeypatch):
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        placement_group_bundle_index)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    made = Driver(lambda report: None)
    made._ray, made._group = FakeRay(), "group"
    return made


def test_neighbours_on_one_machine_and_this_one_first(driver):
    driver._start_agents({"NPU": 1.0}, PLACE)
    bundles = [strategy for strategy, _, _ in driver._ray.started]
    assert bundles == [1, 3, 0, 2]
    assert [words[3:] for _, _, words in driver._ray.started] == [(node, 5) for node in (1, 2, 3, 4)]
    assert driver._ray.started[0][1] == {"num_cpus": 0, "num_gpus": 0, "resources": {"NPU": 1.0}, "max_restarts": 0}


@pytest.mark.parametrize(("bundle", "given"), [
    ({"GPU": 1.0}, {"num_cpus": 0, "num_gpus": 1.0, "resources": {}}),
    ({"CPU": 2.0}, {"num_cpus": 2.0, "num_gpus": 0, "resources": {}}),
])
def test_resources(driver, bundle, given):
    driver._start_agents(bundle, PLACE)
    assert driver._ray.started[0][1] == {**given, "max_restarts": 0}


def test_what_is_missing(driver):
    assert driver._what_is_missing({"NPU": 1.0}, 4) == (
        "4 actors with 1 NPU each are needed, and Ray's cluster has 3 NPU, of which 0 are free.")


def test_all_is_given_back(driver):
    driver._start_agents({"NPU": 1.0}, PLACE)
    driver.close()
    assert len(driver._ray.killed) == 4
    assert driver._ray.removed == ["group"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise ImportError('hidden')", "pip install 'xllm-npu\\[ray\\]'"),
        ("import os; os.kill(os.getpid(), 9)", r"The Ray driver process \(pid \d+\) was ended by SIGKILL."),
        ("def init(**_): raise ConnectionError('nobody')", "No Ray cluster can be connected to .nobody.: start one"),
    ],
)
async def test_no_ray(module, said, tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    placement = RayPlacement(Settings(), print)
    with pytest.raises(ClusterError, match=said):
        await placement.connect()
    await placement.close()
