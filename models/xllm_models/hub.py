"""MODEL as the user writes it -> files on this machine.

A directory, a .gguf file, `smollm2`, or a hub id, in that order. Downloads take safetensors, JSON and
tokenizer files only. Whatever fails is a `HubError` that says what to do. It does not know whether the model
is one that this runtime has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xllm_models import smollm2
from xllm_models.model_cache import HubError, cache_root, cached
from xllm_models.smollm2 import Progress, pull_smollm2

__all__ = [
    "DEFAULT_MODEL",
    "HubError",
    "PulledModel",
    "ResolvedModel",
    "list_pulled",
    "pull_smollm2",
    "resolve_model",
]

DEFAULT_MODEL = smollm2.ALIAS

_ALLOW = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_IGNORE = ["*.bin", "*.pt", "*.pth", "consolidated*", "original/*", "onnx/*", "*.msgpack", "*.h5"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_EXPORT_VERSION = 1  # of the tokenizer files made from a .gguf; part of their cache key


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    path: Path  # a directory with config.json and *.safetensors, or a .gguf file
    kind: Literal["dir", "gguf"]
    tokenizer_dir: Path  # tokenizer.json or whatever AutoTokenizer reads


@dataclass(frozen=True, slots=True)
class PulledModel:
    name: str
    path: Path
    bytes: int


def resolve_model(
    model: str,
    *,
    use_modelscope: bool = False,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = True,
    progress: Progress | None = None,
) -> ResolvedModel:
    """`cache_dir` replaces both our cache and the hub's; without `weights` none are downloaded from a hub;
    `progress` takes (stage, done, total).
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".gguf":
        return _gguf(path, cache_dir)
    if path.is_file():
        raise HubError(f"{model} is a file; give the directory it lies in, or a .gguf file.")
    if model == smollm2.ALIAS:
        return _directory(pull_smollm2(progress, cache_dir))
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise HubError(
            f'There is no directory "{model}" here. Give a model directory, a .gguf file, a hub id such as '
            f"Qwen/Qwen2.5-0.5B-Instruct, or {smollm2.ALIAS}."
        )
    download = _from_modelscope if use_modelscope else _from_hugging_face
    return _directory(download(model, revision, cache_dir, weights))


def list_pulled(cache_dir: str | Path | None = None) -> list[PulledModel]:
    """Models this runtime has put into its own cache; the hubs' caches are theirs to list."""
    directory = smollm2.smollm2_path(cache_dir)
    if not smollm2.is_complete(directory):
        return []
    return [PulledModel(smollm2.ALIAS, directory, sum(f.stat().st_size for f in directory.iterdir()))]


def _directory(path: Path) -> ResolvedModel:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs:
            raise HubError(f"{path} holds .gguf files; give one of them, such as {ggufs[0]}.")
        raise HubError(f"{path} is no model directory: it has no config.json. Give the one that has it.")
    return ResolvedModel(path, "dir", path)


def _gguf(path: Path, cache_dir: str | Path | None) -> ResolvedModel:
    """Its tokenizer is exported once for each state of the file."""
    if not path.is_file():
        raise HubError(f"{path} does not exist. Check the path.")
    status = path.stat()
    state = f"{_EXPORT_VERSION}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    key = hashlib.sha256(state.encode()).hexdigest()[:32]

    def make(directory: Path) -> None:
        from xllm_models.weights.gguf_tokenizer import export_hf_tokenizer  # gguf is needed here only

        export_hf_tokenizer(path, directory)

    def is_complete(directory: Path) -> bool:
        return (directory / "tokenizer_config.json").is_file() and (directory / "tokenizer.json").is_file()

    entry = cache_root(cache_dir) / "tokenizers" / f"{path.stem}-{key}"
    return ResolvedModel(path, "gguf", cached(entry, is_complete, make))


def _from_hugging_face(model: str, revision: str | None, cache_dir: str | Path | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    options = _patterns(weights)
    return _download(
        model,
        "Hugging Face",
        lambda: snapshot_download(model, revision=revision, cache_dir=cache_dir, **options),
        weights,
    )


def _from_modelscope(model: str, revision: str | None, cache_dir: str | Path | None, weights: bool) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise HubError("ModelScope is not installed. Run `pip install 'xllm-npu[modelscope]'`.") from None
    options = _patterns(weights)
    directory = None if cache_dir is None else str(cache_dir)
    return _download(
        model,
        "ModelScope",
        lambda: snapshot_download(model, revision=revision, cache_dir=directory, **options),
        weights,
    )


def _patterns(weights: bool) -> dict[str, Any]:
    """What of a repository is downloaded."""
    return {"allow_patterns": _ALLOW, "ignore_patterns": _IGNORE + ([] if weights else ["*.safetensors"])}


def _download(model: str, hub: str, fetch: Callable[[], str], weights: bool) -> Path:
    from huggingface_hub import errors

    try:
        path = Path(fetch())
        return _with_weights(path, model, hub) if weights else path
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{model} on {hub} is gated: accept its licence on its page, then set HF_TOKEN or run "
            "`hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{model} on {hub} has no such revision. Check --revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{hub} has no model {model}, or it is private. Check the name; for a private one set HF_TOKEN."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise HubError(
            f"{model} is not on this machine and {hub} cannot be reached. {_OFFLINE_ADVICE}"
        ) from error
    except Exception as error:
        raise HubError(_explained(error, model, hub)) from error


_OFFLINE_ADVICE = "Check the network (or HF_ENDPOINT, HF_HUB_OFFLINE), or give a model directory."


def _explained(error: Exception, model: str, hub: str) -> str:
    """For what the hubs' clients raise without a class of its own."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"{hub} refuses access to {model} (HTTP {status}). Set HF_TOKEN to a token that may read it."
    if status == 404:
        return f"{hub} has no model {model} (HTTP 404). Check the name."
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{model} could not be downloaded from {hub} ({reason}). {_OFFLINE_ADVICE}"


def _with_weights(path: Path, model: str, hub: str) -> Path:
    if not any(path.glob("*.safetensors")):
        raise HubError(
            f"{model} on {hub} has no *.safetensors weights (pickles are not loaded). Choose a repository "
            "that has, or download its .gguf file and give that."
        )
    return path
