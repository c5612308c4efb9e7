"""What the documents say exists: files, links, commands, flags, code names."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, blocks, examples
from xllm_npu.cli import VERBS
from xllm_npu.config.load import load
from xllm_npu.config.names import canonical, is_boolean
from xllm_npu.service.protocol import IGNORED, ChatBody, CompletionBody
from xllm_npu.service.unsupported import UNSUPPORTED

DOCUMENTS = ("README.md", "README.zh.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/configuration.md",
             "docs/requests.md", "docs/lora.md", "docs/structured-output.md",
             "docs/tools-and-reasoning.md", "docs/embeddings.md", "docs/models.md", "docs/parallelism.md",
             "docs/gpu.md", "docs/install-npu.md", "docs/kernels.md", "docs/memory.md", "docs/several-models.md",
             "docs/api.md", "docs/operations.md", "docs/security.md")
ROOMS = ("xllm_npu", "platform", "models", "kernels_npu", "configs", "docker", "docs", "benchmarks", "tests", ".ci")
# Flags that are pip's, docker's, the command line's own, or placeholders.
OTHER_FLAGS = {"--extra-index-url", "--no-deps", "--force-reinstall", "--yes", "--json", "--help", "--flag",
               "--rm", "--init", "--shm-size", "--network", "--device", "--build-arg", "--user",
               "--runtime", "--dry-run",
               # guidellm's and aiperf's
               "--backend", "--data", "--profile", "--constraint", "--url", "--endpoint-type", "--streaming",
               "--concurrency", "--request-count", "--synthetic-input-tokens-mean", "--output-tokens-mean",
               "--extra-inputs"}  # fmt: skip


def _text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name: str) -> None:
    rooms = "|".join(map(re.escape, ROOMS))
    paths = re.findall(rf"`((?:{rooms})/[\w./-]*)`", _text(name))
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", _text(name)) if "://" not in target]
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
    assert missing == []


def test_one_request_passes_through_many_files() -> None:
    assert len(set(re.findall(r"`[\w/]+\.py`", _text("docs/architecture.md")))) > 25


def test_every_rule_of_memory_is_accounted_for_once() -> None:
    rows = re.findall(r"^\| (\d[\d, to]*) \|", _text("docs/memory.md"), re.MULTILINE)
    numbers: list[int] = []
    for part in ", ".join(rows).split(", "):
        first, _, last = part.partition(" to ")
        numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(1, 69))


def test_python_names_exist() -> None:
    """Identifiers in backticks: those with an underscore or a capital are ours."""
    code = "\n".join(path.read_text("utf-8") for root in ("xllm_npu", "platform", "models")
                     for path in (ROOT / root).rglob("*.py"))  # fmt: skip
    names = set(re.findall(r"`(_?[A-Za-z_]+)(?:\(.*?\))?`", _text("CONTRIBUTING.md")))
    ours = {name for name in names if "_" in name or name[0].isupper()}
    assert ours, "the guide names what to write"
    assert {name for name in ours if not re.search(rf"\b{name}\b", code)} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_exist(name: str) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", _text(name))) - OTHER_FLAGS
    unknown = [f for f in flags if _unknown(canonical(f.lstrip("-")))]
    assert unknown == []


def _unknown(name: str) -> bool:
    options = {key: info for verb in VERBS.values() for key, info in verb.options.model_fields.items()}
    return is_boolean(name, options) is None and not is_boolean(name.removeprefix("no_"), options)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for verb, words in _commands(name):
        assert verb in VERBS, verb
        load(["--json-output" if word == "--json" else word for word in words], {}, options=VERBS[verb].options,
             several_models=VERBS[verb].several_models)


def _commands(name: str) -> list[tuple[str, list[str]]]:
    """Every `xllm-npu VERB ...` in a code block or in backticks."""
    text = "\n".join([b.text for b in blocks(name)] + re.findall(r"`([^`\n]+)`", _text(name)))
    text = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[ /])xllm-npu ([a-z]+)\b([^\n|]*)", text, re.MULTILINE)
    return [(verb, [w for w in shlex.split(rest, comments=True) if w not in ("...", "--help")]) for verb, rest in found]


def test_the_file_of_several_models_is_accepted(tmp_path: Path) -> None:
    (block,) = [b for b in blocks("docs/several-models.md") if b.info == ("json", "models")]
    (tmp_path / "c.json").write_text(block.text)
    loaded, _ = load(["--config-json-file", str(tmp_path / "c.json")], {}, several_models=True)
    assert [settings.model.max_model_len for settings in loaded.models] == [None, 8192]


def test_every_request_field_is_described() -> None:
    fields = {name for body in (ChatBody, CompletionBody) for name in body.model_fields} | IGNORED | UNSUPPORTED.keys()
    text = _text("docs/requests.md")
    assert {name for name in fields if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", _text("Makefile"), re.MULTILINE)
    used = re.findall(r"(?:^ *|`)make ([a-z-]+)", _text(name), re.MULTILINE)
    assert used
    assert set(used) <= set(targets)


@pytest.mark.parametrize(("run", "output"), examples("docs/configuration.md"))
def test_configuration_examples(run: Block, output: Block | None) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLLM_NPU_")}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / r) for r in (".", "platform", "models"))
    text = f'xllm-npu() {{ "{sys.executable}" -m xllm_npu.cli "$@"; }}\n{run.text}'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert done.stdout == output.text


def test_nothing_points_into_one_machine() -> None:
    for name in DOCUMENTS:
        assert not re.search(r"/(?:home|root|tmp|work)/", _text(name)), name


def test_documents_are_all_listed() -> None:
    found = {str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *Path(ROOT / "docs").rglob("*.md")]}
    assert found == set(DOCUMENTS)
