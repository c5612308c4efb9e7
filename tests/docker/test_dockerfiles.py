"""Images are not built here: their files are read, checked by rule, and each RUN line is run with recording tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.docker.dockerfile import Dockerfile, Instruction, Stage, assigned, read

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("npu", "cuda", "cpu")
FILES = {name: ROOT / "docker" / f"Dockerfile.{name}" for name in NAMES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
GIVEN = {"HOME", "PATH"}  # by the base image
TOOLS = ("apt-get", "rm", "mkdir", "chown", "getent", "groupadd", "useradd", "python3", "pip")

every_file = pytest.mark.parametrize("name", NAMES)


def image(name: str) -> Stage:
    return read(FILES[name]).image


def test_all_dockerfiles_are_tested() -> None:
    assert set((ROOT / "docker").glob("Dockerfile*")) == set(FILES.values())


@pytest.mark.parametrize("text", ["RUM true", "FROM a\nRUN true \\", "RUN true\nFROM a"])
def test_the_parser_refuses_what_is_wrong(text: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(ValueError, match=r"^line [12]: "):
        read(tmp_path / "Dockerfile")


@every_file
def test_every_base_has_a_tag_or_is_a_stage(name: str) -> None:
    file = read(FILES[name])
    stages = {stage.name for stage in file.stages}
    for stage in file.stages:
        base = expanded(stage.base, file.arguments)
        assert base in stages or re.fullmatch(r"[\w./-]+:[\w.-]+", base), base
        assert not base.endswith(":latest")


def expanded(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


@every_file
def test_variables_are_declared_where_they_are_used(name: str) -> None:
    """An ARG from before FROM is unknown in a stage that does not name it again."""
    file = read(FILES[name])
    for stage in file.stages:
        assert set(re.findall(r"\$\{(\w+)", stage.base)) <= set(file.arguments)
        known = set(GIVEN)
        for instruction in stage.instructions:
            assert instruction.variables <= known, f"line {instruction.line}"
            if instruction.word == "ARG":
                known.add(assigned(instruction)[0])
            if instruction.word == "ENV":
                known |= set(re.findall(r"(\w+)=", instruction.text))


@every_file
def test_what_is_copied_exists_and_is_let_through(name: str) -> None:
    rules = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for source in (source for copy in image(name).of("COPY") for source in copy.text.split()[:-1]):
        assert (ROOT / source).exists(), source
        assert any(source == rule or source.startswith(f"{rule}/") for rule in allowed), source


@every_file
def test_everything_that_is_built_is_copied(name: str) -> None:
    copied = {source for copy in image(name).of("COPY") for source in copy.text.split()[:-1]}
    needed = {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], PROJECT["project"]["readme"],
              *PROJECT["project"]["license-files"], "pyproject.toml"}  # fmt: skip
    assert needed <= copied


@every_file
def test_it_runs_as_an_ordinary_user_by_the_entry_point(name: str) -> None:
    stage = image(name)
    assert stage.last("USER").text == "${USER_ID}:${GROUP_ID}"
    assert dict(map(assigned, stage.of("ARG")))["USER_ID"] == "1000"
    home = stage.last("WORKDIR").text
    assert f"HOME={home}" in {env.text for env in stage.of("ENV")}
    assert any(f'chown -R "${{USER_ID}}:${{GROUP_ID}}" {home}' in run.text for run in stage.of("RUN"))
    (entry,) = stage.last("ENTRYPOINT").listed or []
    assert Path(entry).parent == Path("/usr/local/bin")
    copied = {Path(source).name for copy in stage.of("COPY") for source in copy.text.split()[:-1]
              if copy.text.split()[-1] == "/usr/local/bin/"}  # fmt: skip
    assert Path(entry).name in copied
    assert os.access(ROOT / "docker" / Path(entry).name, os.X_OK)
    assert stage.last("CMD").listed == ["serve", "--platform", name]
    assert stage.last("EXPOSE").text == "8000"
    health = re.fullmatch(r"(?:--[\w-]+=\w+ )*CMD (.*)", stage.last("HEALTHCHECK").text)
    assert health is not None
    command = Instruction("CMD", health[1], 0).listed
    assert command == ["python3", "/usr/local/bin/health.py"]
    assert "health.py" in copied


@every_file
def test_the_image_keeps_no_caches(name: str) -> None:
    for run in image(name).of("RUN"):
        if "apt-get install" in run.text:
            assert re.match(r"apt-get update\s+&& apt-get install -y --no-install-recommends ", run.text)
            assert run.text.endswith("&& rm -rf /var/lib/apt/lists/*")
        for install in re.findall(r"pip install [^&;]*", run.text):
            assert "--no-cache-dir" in install


@every_file
def test_every_run_line_is_shell(name: str) -> None:
    for run in image(name).of("RUN"):
        done = subprocess.run(["bash", "-n", "-c", run.text], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, ""), f"line {run.line}"


def test_each_soc_has_its_image_and_versions_are_the_projects() -> None:
    file = read(FILES["npu"])
    bases = {stage.name: expanded(stage.base, file.arguments) for stage in file.stages[:-1]}
    assert bases == {f"soc-{soc}": f"quay.io/ascend/cann:9.1.0-{chip}-ubuntu22.04-py3.12"
                     for soc, chip in (("a2", "910b"), ("a3", "a3"), ("310p", "310p"))}  # fmt: skip
    assert expanded(file.image.base, file.arguments) == "soc-a2"
    pins = [line for line in (ROOT / "constraints-npu.txt").read_text("utf-8").splitlines() if "==" in line]
    assert [pin.partition("==")[0] for pin in pins] == ["torch", "torch-npu", "triton-ascend", "ascendnpu-ir"]
    assert set(pins[:2]) <= set(PROJECT["project"]["optional-dependencies"]["npu"])


def run_lines(stage: Stage, arguments: dict[str, str], folder: Path) -> list[str]:
    """Runs a stage's RUN lines with tools that only write down how they were called; returns the calls."""
    tools = folder / "tools"
    tools.mkdir()
    log = folder / "calls"
    for tool in TOOLS:
        # getent: no such user yet, as in the bases
        status = 2 if tool == "getent" else 0
        (tools / tool).write_text(f'#!/bin/sh\necho {tool} "$@" >> {log}\nexit {status}\n')
        (tools / tool).chmod(0o755)
    values = {"PATH": str(tools)}
    for instruction in stage.instructions:
        if instruction.word == "ARG":
            key, value = assigned(instruction)
            if key in arguments or "=" in instruction.text:
                values[key] = arguments.get(key, value)
        if instruction.word == "RUN":
            done = subprocess.run(["/bin/bash", "-eo", "pipefail", "-c", instruction.text], env=values, timeout=20,
                                  capture_output=True, text=True)  # fmt: skip
            assert (done.returncode, done.stderr) == (0, ""), f"line {instruction.line}"
    return log.read_text().splitlines()


@pytest.mark.parametrize("soc", ["a2", "a3", "310p"])
def test_steps_of_the_npu_image(soc: str, tmp_path: Path) -> None:
    calls = run_lines(image("npu"), {"SOC": soc, "USER_ID": "2000"}, tmp_path)
    assert "useradd --uid 2000 --gid 1000 --no-create-home HwHiAiUser" in calls
    installs = [call for call in calls if "pip install" in call]
    assert installs[0].endswith(" https://download.pytorch.org/whl/cpu -c constraints-npu.txt . torch-npu pybind11")
    if soc == "310p":
        assert len(installs) == 1
    else:
        assert installs[1:] == [calls[-1]], "triton-ascend is the last package"
        assert "--force-reinstall --no-deps" in calls[-1]
        assert calls[-1].endswith(" triton-ascend==3.2.2")
        assert calls[-2] == "python3 -m pip uninstall --yes triton triton-ascend"


@pytest.mark.parametrize(("name", "package"), [("cuda", ".[cuda]"), ("cpu", ".")])
def test_steps_of_the_other_images(name: str, package: str, tmp_path: Path) -> None:
    calls = run_lines(image(name), {"GROUP_ID": "44"}, tmp_path)
    assert "groupadd --gid 44 xllm-npu" in calls
    assert calls[-1].startswith("python3 -m pip install --no-cache-dir ")
    assert calls[-1].endswith(f" -c constraints.txt {package}")


@every_file
def test_an_entry_of_a_base_that_is_there_already_is_kept(name: str) -> None:
    """Bases may have the user; those that are ours to choose do not."""
    guarded = all("getent" in run.text for run in image(name).of("RUN") if "useradd" in run.text)
    assert guarded == (name == "npu")


@pytest.mark.slow
def test_what_is_copied_can_be_installed_and_started(tmp_path: Path) -> None:
    """The steps that are not CANN's, in a plain folder: COPY, pip install, the entry point."""
    work, prefix = tmp_path / "work", tmp_path / "prefix"
    work.mkdir()
    for copy in image("npu").of("COPY"):
        *sources, target = copy.text.split()
        place = (prefix / "bin") if target == "/usr/local/bin/" else work / target
        for source in sources:
            into = place / Path(source).name if len(sources) > 1 or target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / source, into)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--prefix", str(prefix), "."],
                   cwd=work, check=True, timeout=300)  # fmt: skip
    (site,) = prefix.glob("lib/python*/site-packages")
    environment = {**os.environ, "PATH": f"{prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(site)}
    for words in (["--version"], ["doctor", "--platform", "cpu", "--port", "0"]):
        done = subprocess.run([f"{prefix}/bin/entrypoint.sh", *words], env=environment, cwd=tmp_path, timeout=120,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in site.rglob("*") if fnmatch(path.name, "test_*.py") and "xllm" in str(path)]


def test_dockerfiles_are_read_as_docker_reads_them() -> None:
    file: Dockerfile = read(FILES["npu"])
    assert [stage.name for stage in file.stages] == ["soc-a2", "soc-a3", "soc-310p", ""]
    assert "pciutils && rm" in " ".join(file.image.of("RUN")[0].text.split())
