"""The compose files: they name what the Dockerfiles and the installation guide name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.dockerfile import assigned, read
from xllm_npu.config.load import load
from xllm_npu.doctor.versions import ADAPTERS, OLDEST_DRIVER, TRITON_CANN, shown

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("npu", "cuda", "cpu")


def server(name: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / f"docker/compose.{name}.yaml").read_text("utf-8"))
    assert set(document) == {"name", "services", "volumes"}
    (service,) = document["services"].values()
    return dict(service)


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", text)


@pytest.mark.parametrize("name", NAMES)
def test_server(name: str) -> None:
    service = server(name)
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        ROOT / f"docker/Dockerfile.{name}"
    )
    image = read(ROOT / f"docker/Dockerfile.{name}").image
    assert service["ports"] == [f"127.0.0.1:8000:{image.last('EXPOSE').text}"]
    assert f"models:{image.last('WORKDIR').text}/.cache" in service["volumes"]
    assert service["init"] is True
    verb, *words = map(with_defaults, service["command"])
    assert verb == "serve"
    given = {key: with_defaults(str(value)) for key, value in service["environment"].items()}
    settings = load(words, given)[0].settings
    assert settings.execution.platform == name
    assert not {"--host", "--port"} & set(words), "the health check would not know"


def test_build_arguments_exist() -> None:
    file = read(ROOT / "docker/Dockerfile.npu")
    assert set(server("npu")["build"]["args"]) <= set(file.arguments)


def test_npu_has_what_the_guide_says() -> None:
    """Devices and mounts of the guide's `docker run` line; that one may be longer, for more devices."""
    service = server("npu")
    line = next(text for text in re.findall(r"```bash run-one\n(.*?)```", _guide(), re.DOTALL))
    devices = set(re.findall(r"--device (\S+)", line))
    mounts = {m for m in re.findall(r"-v (\S+)", line) if m.startswith("/")}
    assert devices == set(service["devices"])
    assert mounts == {volume for volume in service["volumes"] if volume.startswith("/")}
    assert "--shm-size=1g" in line
    assert service["shm_size"] == "1g"


def test_commands_of_the_guide_are_accepted() -> None:
    lines = re.findall(r"^docker run ((?:.*\\\n)*.*)", _guide(), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.replace("\\\n", " "))
        given = dict(word.split("=", 1) for word in words if word.startswith("XLLM_NPU_") and "=" in word)
        verb, *flags = words[words.index("xllm-npu:npu-a2") + 1 :]
        assert verb == "serve"
        assert load(flags, given)[0].settings.execution.platform == "npu"


def test_versions_of_the_guide_are_the_doctors() -> None:
    row = r"^\| (2\.[^\s,]+).*? \| (\S+) \| (\S+) or newer.*? \| (\S+) or newer"
    rows = re.findall(row, _guide(), re.MULTILINE)
    known = [(row.torch_npu, row.torch, shown(row.cann), shown(OLDEST_DRIVER[row.cann])) for row in ADAPTERS]
    assert rows == known[::-1]
    for version, cann in TRITON_CANN.items():
        assert re.search(rf"{version} (?:is )?for (?:CANN )?{shown(cann)}", _guide())
    values = dict(map(assigned, read(ROOT / "docker/Dockerfile.npu").image.of("ARG")))
    assert f"triton-ascend=={values['TRITON_ASCEND']}" in _guide()
    assert read(ROOT / "docker/Dockerfile.npu").arguments["CANN_VERSION"].startswith(shown(TRITON_CANN["3.2.2"]))


def _guide() -> str:
    return (ROOT / "docs/install-npu.md").read_text("utf-8")
