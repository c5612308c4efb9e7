"""Adapters by name over engines that only remember what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.config.lora import LoraModule, LoraSettings
from xllm_npu.master.adapters import AdapterError, AdapterGone, Adapters
from xllm_npu.master.engine_group import CommandFailed, EnginesGone
from xllm_npu.state.messages import EngineCommand, LoadLora, UnloadLora


class Engines:
    def __init__(self, bad: Iterable[str] = ()) -> None:
        self.loaded: dict[int, str] = {}
        self.bad = set(bad)
        self.gone = False
        self.used: set[int] = set()  # which must not be unloaded

    async def command(self, message: EngineCommand) -> None:
        await asyncio.sleep(0)
        if self.gone:
            raise EnginesGone("gone")
        if isinstance(message, LoadLora):
            if message.path in self.bad:
                raise CommandFailed("It is bad.")
            self.loaded[message.lora_id] = message.path
        elif isinstance(message, UnloadLora):
            assert message.lora_id not in self.used, "an adapter is unloaded while it is used"
            self.loaded.pop(message.lora_id, None)


def adapters_of(engines: Engines, **options) -> Adapters:
    return Adapters(LoraSettings(enable_lora=True, **options), engines.command)


def test_those_of_the_settings_are_loaded_first_and_come_back():
    async def run():
        engines = Engines()
        adapters = adapters_of(engines, lora_modules=(LoraModule(name="a", path="/a", base_model_name="b"),))
        await adapters.load_all()
        await adapters.load("late", "/late")
        await adapters.load("a", "/a2", in_place=True)
        before = {a.name: a.id for a in adapters.listed}
        replacement = Engines(bad={"/late"})
        adapters._command = replacement.command
        engines.gone = True
        await adapters.load_all()  # after a restart
        assert [a.name for a in adapters.listed] == ["a"]
        assert adapters.get("a").id != before["a"]
        assert list(replacement.loaded.values()) == ["/a2"]

    asyncio.run(run())


def test_one_of_the_settings_that_cannot_be_loaded():
    adapters = adapters_of(Engines(bad={"/a"}), lora_modules=(LoraModule(name="a", path="/a"),))
    with pytest.raises(AdapterError, match="The adapter a cannot be loaded: It is bad"):
        asyncio.run(adapters.load_all())


def test_engines_that_die_while_adapters_come_back():
    async def run():
        engines = Engines()
        adapters = adapters_of(engines)
        await adapters.load_all()
        await adapters.load("a", "/a")
        await adapters.load("b", "/b")
        engines.gone = True
        with pytest.raises(EnginesGone):
            await adapters.load_all()
        engines.gone = False
        await adapters.load_all()
        assert [a.name for a in adapters.listed] == ["a", "b"]

    asyncio.run(run())


def test_an_unloaded_adapter_serves_those_who_use_it():
    async def run():
        engines = Engines()
        adapters = adapters_of(engines)
        await adapters.load("a", "/a")
        lora_id = adapters.get("a").id
        adapters.take(lora_id)
        engines.used.add(lora_id)
        await adapters.unload("a")
        await adapters.settled()
        assert adapters.get("a") is None
        assert engines.loaded == {lora_id: "/a"}
        with pytest.raises(AdapterGone):
            adapters.take(lora_id)
        engines.used.clear()
        adapters.give(lora_id)
        await adapters.settled()
        assert not engines.loaded
        assert not adapters.num_loaded

    asyncio.run(run())


def test_limits_and_names():
    async def run():
        adapters = adapters_of(Engines(bad={"/bad"}), max_cpu_loras=1)
        for name, path, message, param in (("", "/a", "1 to 256", "lora_name"), ("x\n", "/a", "1 to 256", "lora_name"),
                                           ("a", "", "directory", "lora_path"), ("a", "/bad", "bad", "lora_path")):
            with pytest.raises(AdapterError, match=message) as caught:
                await adapters.load(name, path)
            assert caught.value.param == param
        await adapters.load("a", "/a")
        with pytest.raises(AdapterError, match="load_inplace"):
            await adapters.load("a", "/a")
        with pytest.raises(AdapterError, match="max_cpu_loras"):
            await adapters.load("b", "/b")
        await adapters.load("a", "/b", in_place=True)
        with pytest.raises(AdapterError) as caught:
            await adapters.unload("b")
        assert caught.value.status == 404
        off = Adapters(LoraSettings(), Engines().command)
        with pytest.raises(AdapterError, match="enable_lora"):
            await off.load("a", "/a")

    asyncio.run(run())


def test_a_caller_who_leaves_does_not_leave_half_an_adapter():
    async def run():
        engines = Engines()
        adapters = adapters_of(engines)
        loading = asyncio.create_task(adapters.load("a", "/a"))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await adapters.load("b", "/b")  # after it
        assert [a.name for a in adapters.listed] == ["a", "b"]
        assert len(engines.loaded) == 2

    asyncio.run(run())


STEPS = st.lists(st.tuples(st.sampled_from(["load", "replace", "unload", "take", "give", "restart"]),
                           st.sampled_from("abc"), st.sampled_from(["/1", "/2", "/bad"])), max_size=30)


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_any_sequence_leaves_what_has_a_name_or_is_used(steps):
    async def run():
        engines = Engines(bad={"/bad"})
        adapters = adapters_of(engines, max_cpu_loras=4)
        await adapters.load_all()
        named, used = {}, []  # name -> path; ids
        for what, name, path in steps:
            if what in ("load", "replace"):
                try:
                    await adapters.load(name, path, in_place=what == "replace")
                    named[name] = path
                except AdapterError:
                    assert path == "/bad" or name in named or adapters.num_loaded >= 4
            elif what == "unload" and name in named:
                await adapters.unload(name)
                del named[name]
            elif what == "take" and name in named:
                adapters.take(adapters.get(name).id)
                used.append(adapters.get(name).id)
            elif what == "give" and used:
                one = used.pop(0)
                engines.used = set(used)
                adapters.give(one)
            elif what == "restart":
                engines.loaded.clear()
                for one in used:  # its requests end with an error
                    adapters.give(one)
                used.clear()
                engines.used = set()
                await adapters.settled()
                await adapters.load_all()
            engines.used = set(used)
            await adapters.settled()
            assert {a.name: a.path for a in adapters.listed} == named
            ids = {a.id for a in adapters.listed}
            assert set(engines.loaded) == ids | set(used)
            assert adapters.num_loaded == len(engines.loaded)

    asyncio.run(run())
