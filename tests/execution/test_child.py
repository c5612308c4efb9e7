"""What a child process leaves behind when its parent dies: nothing."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from xllm_npu.execution.child import lacks_memory, remove_directory
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.launch import EngineInit


def test_a_directory_goes_while_others_fill_it(tmp_path: Path):
    directory = tmp_path / "sockets"
    made, ended = threading.Event(), threading.Event()

    def fill() -> None:
        count = 0
        while not ended.is_set():
            try:
                (directory / str(count)).touch()
                count += 1
            except FileNotFoundError:
                pass
            if count > 100:
                made.set()

    for _ in range(20):
        made.clear()
        directory.mkdir()
        thread = threading.Thread(target=fill)
        thread.start()
        assert made.wait(30)
        remove_directory(str(directory))
        ended.set()
        thread.join()
        ended.clear()
        assert list(tmp_path.iterdir()) == []
    remove_directory(str(directory))  # which is gone already


@pytest.mark.multiprocess
def test_an_engine_whose_parent_is_dead_already(tmp_path: Path):
    directory = tmp_path / "sockets"
    init = EngineInit(settings="{}", requests=f"ipc://{directory}/requests", outputs=f"ipc://{directory}/outputs",
                      directory=str(directory), seed=0, slots=[])
    command = [sys.executable, "-m", "xllm_npu.master.engine_process"]
    engines = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    for engine in engines:
        engine.communicate(msgspec.json.encode(init) + b"\n", timeout=60)
        assert engine.returncode == 1
        assert list(tmp_path.iterdir()) == []


def test_want_of_memory_is_found_among_causes_that_may_be_a_ring():
    error, other = RuntimeError("a worker died"), RuntimeError("a collective failed")
    error.__cause__ = error
    assert not lacks_memory(error)
    error.__cause__, other.__cause__ = other, error
    assert not lacks_memory(error)
    other.__cause__ = PageGrowthRefused("driver", "no memory")
    assert lacks_memory(error)
