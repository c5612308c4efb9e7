"""What happens in a container before the program: CANN's environment, libraries of the driver, a home, the program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/entrypoint.sh"
SHOW = 'printf "%s\\n" "$0" "$#" "$@" "opp=$ASCEND_OPP_PATH" "lib=$LD_LIBRARY_PATH" "home=$HOME" "user=$USER"'


class Container:
    """A folder with /usr/local/Ascend in it, and a PATH with programs that show what they were given."""

    def __init__(self, folder: Path) -> None:
        self.ascend, self.bin, self.home = folder / "Ascend", folder / "bin", folder / "home"
        self.folder = folder
        for made in (self.ascend, self.bin, self.home):
            made.mkdir()
        for program in ("xllm-npu", "npu-smi"):
            (self.bin / program).write_text(f"#!/bin/bash\n{SHOW}\n")
            (self.bin / program).chmod(0o755)

    def cann(self, place: str, text: str) -> None:
        script = self.ascend / place / "set_env.sh"
        script.parent.mkdir(parents=True)
        script.write_text(text)

    def start(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        values = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "ASCEND_ROOT": str(self.ascend),
                  "TMPDIR": str(self.folder), **environment}  # fmt: skip
        return subprocess.run([SCRIPT, *words], env=values, capture_output=True, text=True, timeout=30)

    def shown(self, *words: str, **environment: str) -> list[str]:
        done = self.start(*words, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_without_cann_the_program_gets_the_arguments_as_they_are(container: Container) -> None:
    shown = container.shown("serve", "a model", "--json", "")
    assert shown[:6] == [str(container.bin / "xllm-npu"), "4", "serve", "a model", "--json", ""]
    assert shown[6:8] == ["opp=", "lib="]


def test_flags_and_nothing_are_the_programs(container: Container) -> None:
    assert container.shown("--version")[:3] == [str(container.bin / "xllm-npu"), "1", "--version"]
    assert container.shown()[1] == "0"
    assert container.shown("help")[0] == str(container.bin / "xllm-npu")  # a builtin of the shell, and no program
    assert container.shown("no-such-verb")[0] == str(container.bin / "xllm-npu")  # which says what is wrong


def test_another_program_takes_its_place(container: Container) -> None:
    assert container.shown("npu-smi", "info")[:3] == [str(container.bin / "npu-smi"), "1", "info"]


@pytest.mark.parametrize("place", ["cann", "ascend-toolkit", "cann-9.1.0"])
def test_cann_is_sourced_where_it_is(place: str, container: Container) -> None:
    container.cann(place, f'export ASCEND_OPP_PATH="$UNSET_VARIABLE"/{place}/opp$#\n')
    assert f"opp=/{place}/opp0" in container.shown("serve", "m")  # $#: it does not see the arguments


def test_the_newer_layout_comes_first_and_one_is_enough(container: Container) -> None:
    for place in ("ascend-toolkit", "cann"):
        container.cann(place, f'export ASCEND_OPP_PATH="$ASCEND_OPP_PATH+{place}"\n')
    assert "opp=+cann" in container.shown("serve")


def test_an_environment_that_is_set_already_stays(container: Container) -> None:
    container.cann("cann", "export ASCEND_OPP_PATH=other\n")
    assert "opp=/mine" in container.shown("serve", ASCEND_OPP_PATH="/mine")


def test_a_script_that_fails_is_named_and_the_program_starts(container: Container) -> None:
    container.cann("cann", "export ASCEND_OPP_PATH=half\nfalse\nreturn 3\n")
    done = container.start("serve")
    assert done.returncode == 0
    assert "opp=half" in done.stdout
    assert done.stderr == f"{container.ascend}/cann/set_env.sh failed with status 3\n"


def test_the_drivers_libraries_come_last_and_once(container: Container) -> None:
    libraries = container.ascend / "driver/lib64"
    (libraries / "driver").mkdir(parents=True)
    assert f"lib={libraries}:{libraries}/driver" in container.shown("serve")
    given = f"/cann/lib64:{libraries}/driver"
    assert f"lib={given}:{libraries}" in container.shown("serve", LD_LIBRARY_PATH=given)


def test_an_unknown_user_gets_a_home_and_a_name(container: Container) -> None:
    shown = container.shown("serve", HOME="/no/such/home")
    home = container.folder / f"xllm-npu-home-{os.getuid()}"
    assert f"home={home}" in shown
    assert home.is_dir()
    assert f"home={container.home}" in container.shown("serve")
    assert any(line.startswith("user=") and line != "user=" for line in shown)
    assert "user=me" in container.shown("serve", USER="me")


def test_the_programs_exit_code_is_the_containers(container: Container) -> None:
    (container.bin / "xllm-npu").write_text("#!/bin/sh\nexit 7\n")
    assert container.start("serve").returncode == 7
