"""Adapters of the Python API: loaded on first use, dropped for others, and what is refused."""

import pytest

from xllm_npu.config.lora import LoraSettings
from xllm_npu.master.local_adapters import LocalAdapters
from xllm_npu.state.lora_request import LoRARequest
from xllm_npu.state.messages import CommandDone, LoadLora, UnloadLora
from xllm_npu.state.sampling_params import InvalidParameter

A, B, C = (LoRARequest(name, i, f"/adapters/{name}") for i, name in enumerate("abc", 1))


class Engine:
    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.in_use: set[int] = set()
        self.commands: list = []

    def __call__(self, message) -> CommandDone:
        self.commands.append(message)
        if isinstance(message, LoadLora):
            if "bad" in message.path:
                return CommandDone("There is no adapter in it.")
            assert message.lora_id not in self.loaded
            self.loaded[message.lora_id] = message.path
        elif message.lora_id in self.in_use:
            return CommandDone("Requests that use the adapter are open.")
        else:
            del self.loaded[message.lora_id]
        return CommandDone()


def adapters_of(engine: Engine, **settings) -> LocalAdapters:
    return LocalAdapters(LoraSettings(**{"enable_lora": True, **settings}), engine)


def test_each_is_loaded_once():
    engine = Engine()
    adapters = adapters_of(engine)
    assert adapters.numbers([A, None, B, A]) == [1, 0, 2, 1]
    assert adapters.numbers([B, B]) == [2, 2]
    assert engine.commands == [LoadLora(1, "/adapters/a"), LoadLora(2, "/adapters/b")]


def test_the_one_that_was_used_least_recently_makes_room():
    engine = Engine()
    adapters = adapters_of(engine, max_cpu_loras=2)
    adapters.numbers([A, B])
    adapters.numbers([A])
    assert adapters.numbers([C]) == [3]
    assert engine.loaded == {1: "/adapters/a", 3: "/adapters/c"}
    assert adapters.numbers([C, B]) == [3, 4]  # a number of its own, as it was loaded anew
    assert engine.loaded == {3: "/adapters/c", 4: "/adapters/b"}
    engine.in_use = {3}
    assert adapters.numbers([A]) == [5]  # of a call that was interrupted something is still running
    assert engine.loaded == {3: "/adapters/c", 5: "/adapters/a"}
    engine.in_use = {3, 5}
    with pytest.raises(InvalidParameter, match="all in use"):
        adapters.numbers([B])
    assert UnloadLora(3) in engine.commands


@pytest.mark.parametrize(("requests", "word"), [
    ([A, B, C], "3 adapters, and 2"), ([LoRARequest("a", 0, "/a")], "at least 1"),
    ([A, LoRARequest("a", 1, "/elsewhere")], "another directory"), ([LoRARequest("x", 9, "/bad")], "no adapter in it")])
def test_what_is_refused(requests, word):
    engine = Engine()
    adapters = adapters_of(engine, max_cpu_loras=2)
    with pytest.raises(InvalidParameter, match=word) as caught:
        adapters.numbers(requests)
    assert caught.value.param == "lora_request"
    assert engine.loaded == {}
    assert adapters.numbers([B]) != [0]


def test_only_where_adapters_are_enabled():
    adapters = adapters_of(Engine(), enable_lora=False)
    assert adapters.numbers([None, None]) == [0, 0]
    with pytest.raises(InvalidParameter, match="enable_lora=True"):
        adapters.numbers([A])


def test_a_number_stands_for_one_directory_for_good():
    adapters = adapters_of(Engine())
    adapters.numbers([A])
    with pytest.raises(InvalidParameter, match="another directory"):
        adapters.numbers([LoRARequest("a", 1, "/elsewhere")])
