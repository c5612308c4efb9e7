"""Discovery and selection of platforms, built-in and from other distributions."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from xllm_platform import registry
from xllm_platform.base import Availability, PlatformError

TOY = """
    import torch
    from xllm_platform.base import Availability, Capabilities, MemoryInfo, Platform


    class ToyPlatform(Platform):
        name = "toy"
        device_type = "cpu"
        collective_backend = "gloo"
        usable = True

        @classmethod
        def probe(cls):
            return Availability(cls.usable, "" if cls.usable else "the toy is broken")

        @property
        def capabilities(self):
            return Capabilities(notes=("a toy",))

        def device_count(self):
            return 1

        def set_device(self, index):
            pass

        def device(self):
            return torch.device("cpu")

        def device_name(self):
            return "toy"

        def memory_info(self):
            return MemoryInfo(free=1, total=2)

        def synchronize(self):
            pass

        def manual_seed(self, seed):
            torch.manual_seed(seed)


    class FaultyPlatform(ToyPlatform):
        name = "faulty"

        @classmethod
        def probe(cls):
            raise ValueError("boom")
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution made of one module and entry points {name: value}, outside this repository."""

    def install(**points: str) -> None:
        (tmp_path / "toy_platform_module.py").write_text(textwrap.dedent(TOY))
        info = tmp_path / "toy_platform-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-platform\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{lines}")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def set_probe(monkeypatch: pytest.MonkeyPatch, name: str, answer: Availability) -> None:
    monkeypatch.setattr(registry.load(name), "probe", classmethod(lambda cls: answer))


@pytest.fixture
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu", "cuda"):
        set_probe(monkeypatch, name, Availability(False, f"no {name} today"))


def test_auto_falls_back_to_cpu(no_accelerators: None) -> None:
    assert registry.select().name == "cpu"


def test_auto_prefers_npu_then_cuda(no_accelerators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "npu"):
        set_probe(monkeypatch, name, Availability(True))
        assert registry.select().name == name


def test_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(PlatformError, match=r"npu, cuda, cpu\. Did you mean cuda\?"):
        registry.select("cudda")


def test_named_but_unusable_platform_says_why(no_accelerators: None) -> None:
    with pytest.raises(PlatformError, match="npu cannot be used here: no npu today"):
        registry.select("npu")


def test_auto_with_nothing_usable_reports_every_reason(
    no_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_probe(monkeypatch, "cpu", Availability(False, "not Linux"))
    with pytest.raises(PlatformError, match=r"npu: no npu today; cuda: no cuda today; cpu: not Linux"):
        registry.select()


def test_probe_all_covers_every_platform_in_the_order_auto_tries_them() -> None:
    assert list(registry.probe_all()) == ["npu", "cuda", "cpu"]


def test_third_party_platform_needs_no_change_here(distribution, no_accelerators: None) -> None:
    distribution(toy="toy_platform_module:ToyPlatform")
    assert list(registry.probe_all()) == ["npu", "cuda", "toy", "cpu"]
    platform = registry.select("toy")
    assert platform.capabilities.notes == ("a toy",)
    assert registry.select("auto").name == "toy"  # ahead of cpu


def test_unusable_third_party_platform_is_passed_over(
    distribution, no_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(toy="toy_platform_module:ToyPlatform")
    monkeypatch.setattr(registry.load("toy"), "usable", False)
    assert registry.select("auto").name == "cpu"
    assert registry.probe_all()["toy"] == Availability(False, "the toy is broken")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module_anywhere:Platform", "cannot be imported"),
        ("toy_platform_module:Missing", "cannot be imported"),
        ("toy_platform_module:TOY", "cannot be imported"),
        ("toy_platform_module:Availability", "not a subclass"),
        ("toy_platform_module:FaultyPlatform", "ValueError: boom"),
    ],
)
def test_broken_third_party_platform_is_reported_and_stops_nobody(
    distribution, no_accelerators: None, value: str, said: str
) -> None:
    distribution(broken=value)
    assert said in registry.probe_all()["broken"].reason
    assert registry.select("auto").name == "cpu"
    with pytest.raises(PlatformError, match="broken"):
        registry.select("broken")


def test_a_built_in_name_cannot_be_taken_over(distribution) -> None:
    distribution(cpu="toy_platform_module:ToyPlatform", npu="toy_platform_module:ToyPlatform")
    assert registry.known_platforms() == registry.BUILT_IN
    assert registry.select("cpu").name == "cpu"
