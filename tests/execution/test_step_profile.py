"""Profiles: on the thread that runs the steps, begun once, written when they end."""

import gzip
import json

import pytest
import torch
from xllm_platform.cpu.device import CpuPlatform

from xllm_npu.execution.step_profile import ProfileError, StepProfile
from xllm_npu.execution.worker_client import DirectWorker, InProcessWorker


class Adder:
    """A worker whose step is one addition."""

    def __init__(self) -> None:
        self._profile = StepProfile(CpuPlatform(), "rank-0")

    def execute(self, step):
        return torch.ones(step) + torch.ones(step)

    def profile(self, directory: str) -> None:
        self._profile.switch(directory)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", [InProcessWorker, lambda make: DirectWorker(make())])
def test_a_trace_has_the_steps_between(tmp_path, kind):
    worker = kind(Adder)
    try:
        def step(size: int) -> None:
            worker.send(size)
            worker.receive()

        directory = tmp_path / "new" / "traces"
        with pytest.raises(ProfileError, match="No profile"):
            worker.profile("")
        step(1)
        worker.profile(str(directory))
        with pytest.raises(ProfileError, match="already"):
            worker.profile(str(directory))
        for _ in range(3):
            step(2)
        worker.profile("")
        step(1)
    finally:
        worker.close()
    (file,) = directory.iterdir()
    assert file.name.startswith("rank-0.")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::add" for event in events) == 3


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    profile = StepProfile(CpuPlatform(), "rank-0")
    with pytest.raises(ProfileError, match="--profile_dir") as refused:
        profile.switch(str(tmp_path / "file" / "traces"))
    assert str(tmp_path) not in str(refused.value)
    profile.switch(str(tmp_path / "traces"))
    profile.switch("")


def test_a_worker_that_died_is_not_waited_for(tmp_path):
    worker = InProcessWorker(Adder)
    worker.fail(RuntimeError("It died."))
    with pytest.raises(RuntimeError, match="It died"):
        worker.profile(str(tmp_path))
