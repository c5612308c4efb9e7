"""What is read: npu-smi's tables, versions, CANN's places, HCCL's interface patterns, the real host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.doctor.machines import FakeMachine, cann_files, plain_machine, settings, smi_table
from xllm_npu.doctor import machine as machine_module
from xllm_npu.doctor.ascend import find_cann, look, set_env
from xllm_npu.doctor.cluster import interfaces_named
from xllm_npu.doctor.examination import quick_look
from xllm_npu.doctor.finding import Finding, can_serve, softened
from xllm_npu.doctor.machine import Answer, Machine, ThisMachine
from xllm_npu.doctor.npu_smi import Chip, parse
from xllm_npu.doctor.versions import TRITON_CANN, adapter_of, base_version, numbers, series

# The shapes of three drivers: a card of two dies (A3), older titles without Phy-ID (A2), and 310P's own columns.
TWO_DIES = """
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Critical      | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)                        |
| 0       0                 | 499214        | python                   | 26322                                     |
| 0       1                 | 499215        | python                   | 100                                       |
| 0       1                 | 499216        |                          | 7                                         |
"""
ONE_OF_EIGHT = """
| 3     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     6                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
"""
NO_PHY_ID = """
| 4     910B3               | OK            | 97.5        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3379 / 65536         |
"""
INFERENCE_CARD = """
| npu-smi 23.0.0                                   Version: 23.0.0                                       |
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 32896   310P3                 | Warning         | NA           54                0     / 0             |
| 0       0                     | 0000:00:00.0    | 0            1904 / 44213                            |
| No running processes found in NPU 32896                                                                |
"""


def test_npu_smi_of_three_kinds() -> None:
    report = parse(TWO_DIES)
    assert report.driver == "26.0.rc2"
    assert report.chips == (Chip(0, "Ascend910", "OK", 3419, 65536), Chip(1, "Ascend910", "Critical", 2874, 65536))
    assert report.processes == {"python": 26422, "process 499216": 7}
    assert parse(ONE_OF_EIGHT).chips == (Chip(6, "Ascend910", "OK", 3419, 65536),)
    assert parse(NO_PHY_ID).chips == (Chip(0, "910B3", "OK", 3379, 65536),)
    assert parse(INFERENCE_CARD).chips == (Chip(0, "310P3", "Warning", 1904, 44213),)
    assert len(parse(smi_table(8, "910B3")).chips) == 8
    assert parse("dcmi module initialize failed. ret is -8005") == parse("")


@pytest.mark.parametrize(("name", "family"), [
    ("910B3", "A2"), ("Ascend910", "A3"), ("910_9392", "A3"), ("310P3", "310P"), ("950PR", "A5"),
    ("910ProB", "910ProB"),
])  # fmt: skip
def test_families(name: str, family: str) -> None:
    assert Chip(0, name, "OK", 0, 0).family == family


def test_versions() -> None:
    assert numbers("9.1.0-beta.3") == (9, 1, 0)
    assert series("25.3.rc1") == (25, 3)
    assert series("8.3.RC2") == (8, 3)
    assert (series("unknown"), series("9")) == (None, None)
    assert base_version("2.13.0+cpu") == base_version("2.13.0.post1") == "2.13.0"
    names = ("2.10.0", "2.10.0.post3", "2.10.0.post6", "2.13.0")
    found = {name: row.cann for name in names if (row := adapter_of(name))}
    assert found == {"2.10.0": (9, 0), "2.10.0.post3": (9, 0), "2.10.0.post6": (9, 1), "2.13.0": (9, 1)}
    assert adapter_of("2.9.0") is None
    assert adapter_of("2.12.0.post2") == adapter_of("2.12.0")
    assert TRITON_CANN == {"3.2.0": (8, 5), "3.2.1": (9, 0), "3.2.2": (9, 1)}


def test_cann_is_found_where_installers_put_it() -> None:
    old, home = "/usr/local/Ascend/ascend-toolkit/latest", "/home/me/Ascend/cann"
    machine = FakeMachine(files=cann_files("8.5.0", home=old))
    found = find_cann(machine)
    assert found is not None
    assert (found.home, found.version, found.sourced) == (old, "8.5.0", False)
    assert set_env(found.home) == "/usr/local/Ascend/ascend-toolkit/set_env.sh"
    machine.files.update(cann_files("9.2.0", None, home="/opt/cann"))
    machine.environment["ASCEND_TOOLKIT_HOME"] = "/opt/cann"  # what is sourced comes first
    found = find_cann(machine)
    assert found is not None
    assert (found.home, found.version, found.operators, found.sourced) == ("/opt/cann", "9.2.0", None, True)
    mine = FakeMachine(environment={"HOME": "/home/me"}, files={f"{home}/opp/version.info": "version_dir=9.0.0\n"})
    assert getattr(find_cann(mine), "version", None) == "9.0.0"
    beside = find_cann(FakeMachine(files=cann_files("9.1.0", home="/usr/local/Ascend/cann-9.1.0")))
    assert beside is not None
    assert set_env(beside.home) == "/usr/local/Ascend/cann-9.1.0/set_env.sh"


def test_only_accelerators_of_the_right_vendor_count() -> None:
    folder = "/sys/bus/pci/devices/0000:0{}:00.0"
    cards = [("0x19e5", "0x120000"), ("0x19e5", "0x020000"), ("0x10de", "0x120000")]
    files = {f"{folder.format(n)}/{name}": value for n, card in enumerate(cards)
             for name, value in zip(("vendor", "class"), card)}  # fmt: skip
    assert look(FakeMachine(files=files), pci=True).cards == 1
    assert not look(FakeMachine(files=files), pci=False).present


@pytest.mark.parametrize(("pattern", "names"), [
    ("eth", ["eth0", "eth1"]), ("=eth0,enp1", ["eth0", "enp1"]), ("=eth", []),
    ("^eth,lo", ["enp1"]), ("^=eth0", ["lo", "eth1", "enp1"]), ("ib", []),
])  # fmt: skip
def test_interface_patterns(pattern: str, names: list[str]) -> None:
    interfaces = dict.fromkeys(("lo", "eth0", "eth1", "enp1"), ("10.0.0.1",))
    assert interfaces_named(pattern, interfaces) == names


def test_marks_and_lines() -> None:
    bad = Finding("problem", "a.b", "it", "is broken", "nothing works", "mend it")
    assert bad.text() == "problem it: is broken\n           nothing works\n        -> mend it"
    assert bad.sentence() == "it: is broken; nothing works; mend it"
    assert not can_serve([bad])
    assert can_serve(softened([bad]))


class TestThisMachine:
    def test_files(self, tmp_path: Path) -> None:
        machine = ThisMachine()
        (tmp_path / "b").write_text("text")
        (tmp_path / "a").write_bytes(b"\xff")
        assert machine.matches(f"{tmp_path}/[ab]") == [f"{tmp_path}/a", f"{tmp_path}/b"]
        assert (machine.read(f"{tmp_path}/b"), machine.read(f"{tmp_path}/c"), machine.read(str(tmp_path))) == (
            "text", None, None
        )  # fmt: skip
        assert machine.read(f"{tmp_path}/a") == "\ufffd"
        assert machine.exists(f"{tmp_path}/b")
        assert machine.may_use(f"{tmp_path}/b")
        assert machine.capacity(str(tmp_path))
        assert machine.capacity("/no/such/place") is None

    def test_programs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        machine = ThisMachine()
        say = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
        assert machine.run(sys.executable, "-c", say) == Answer(3, "out\nerr\n")
        assert machine.run("no-such-program") is None
        assert machine.program("no-such-program", sys.executable) == sys.executable
        (tmp_path / "garbage").write_bytes(b"\x00")
        (tmp_path / "garbage").chmod(0o755)
        assert getattr(machine.run(f"{tmp_path}/garbage"), "code", None) == 126
        monkeypatch.setattr(machine_module, "RUN_SECONDS", 0.2)
        assert machine.run(sys.executable, "-c", "import threading; threading.Event().wait()") == Answer(None, "")

    def test_packages(self) -> None:
        machine = ThisMachine()
        assert machine.installed("pydantic")
        assert machine.installed("no-such-thing") is None
        assert machine.package_folder("xllm_npu") == str(Path(machine_module.__file__).parents[1])
        assert machine.package_folder("no_such_thing") is None

    def test_address(self) -> None:
        import socket

        machine = ThisMachine()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            assert "in use" in machine.address_error("127.0.0.1", taken.getsockname()[1])
        assert machine.address_error("127.0.0.1", 0) == ""

    def test_the_rest_answers(self) -> None:
        machine: Machine = ThisMachine()
        assert machine.cores() >= 1
        assert 0 < machine.memory()[0] <= machine.memory()[1]
        assert machine.open_files() > 0
        assert any("127.0.0.1" in addresses for addresses in machine.interfaces().values())
        assert machine.system().startswith("Linux ")
        assert machine.user()
        assert machine.environment is os.environ


def test_quick_look_runs_no_program_and_imports_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys, subprocess\nfrom xllm_npu.config.load import load\n"
        "from xllm_npu.doctor.examination import quick_look\n"
        "subprocess.Popen = None\n"
        "quick_look(load(['--platform', 'npu'], {})[0].settings)\n"
        "sys.exit(str({'torch', 'torch_npu', 'triton', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"


def test_quick_look_on_this_machine() -> None:
    assert isinstance(quick_look(settings()), list)
    assert quick_look(settings(), plain_machine()) == []
