"""One rank's weights from another checkpoint than before: checked first, then read into the parameters that are there.

The checkpoint must be of the same network: what config.json and the tensors' headers say is compared before anything
changes. Names, tokenizer and sampling defaults stay those of the model that was started. Knows no other rank;
engine_weights.py has all of them do it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xllm_models import hub
from xllm_models.config import ModelConfig
from xllm_models.pooler import Pooler
from xllm_models.weights.loader import check_weights
from xllm_models.weights.source import WeightError

from xllm_npu.config.model import ModelSettings
from xllm_npu.config.settings import Settings
from xllm_npu.execution.child import describe
from xllm_npu.execution.expert_balancer import ExpertBalancer
from xllm_npu.execution.model_loader import LoadError, load_model_weights, open_weights, read_config
from xllm_npu.memory.worker_resources import WorkerMemoryResources

# Of a configuration: what the loaded network does not depend on.
NOT_THE_NETWORK = frozenset({"torch_dtype", "eos_token_ids", "bos_token_id", "pad_token_id", "generation", "raw"})
SHOWN_CHARS = 80  # of a value in a message


class WeightsRefused(RuntimeError):
    """The checkpoint is not one that can take the place of what is served. The message names no path but the given."""


class CheckpointLoader:
    """A `WeightLoader`: the files at `path` into the weights, as often as asked for; after a sleep too."""

    def __init__(self, settings: Settings, model: Any, path: Path, rank: int) -> None:
        self._settings, self._model, self.path, self._rank = settings, model, path, rank

    def check(self) -> None:
        """Raises WeightError unless the files are there."""
        if self._settings.model.load_format != "dummy":
            open_weights(self._model, self.path)

    def load(self) -> None:
        """Raises WeightError, OSError, ...; the weights are then neither the old nor the new ones."""
        self._model.allocate_weights()
        load_model_weights(self._settings, self._model, self.path, self._rank, lambda done, total: None)


class WeightUpdater:
    def __init__(
        self, settings: Settings, config: ModelConfig, model: Any, loader: CheckpointLoader,
        synchronize: Callable[[], None], checkpoint: str,
    ) -> None:
        """`synchronize` waits for the device's work. `checkpoint`: what `loader` has loaded, as it was given."""
        self._settings, self._config, self._model, self._loader = settings, config, model, loader
        self._synchronize = synchronize
        self._paths = {checkpoint: loader.path}  # of what is loaded, and of what was checked last
        self._loaded = checkpoint
        # What else has to follow, where there is any.
        self.pooler: Pooler | None = None
        self.balancer: ExpertBalancer | None = None
        self.memory: WorkerMemoryResources | None = None

    def check(self, checkpoint: str) -> None:
        """Whether `checkpoint`, a directory or hub id, could be loaded, by its headers. Changes nothing, and may run
        beside steps; what is at a hub is downloaded. Raises WeightsRefused.
        """
        path: Path | None = None
        try:
            path = resolve_checkpoint(self._settings.model, checkpoint)
            if path.suffix == ".gguf":
                raise LoadError("A .gguf file cannot take another checkpoint's place: give safetensors.")
            self._check_config(path)
            check_weights(self._model, open_weights(self._model, path))
            if self.pooler is not None:
                self.pooler.check(path)
        except Exception as error:  # whatever is in the files: the model serves on
            raise WeightsRefused(_told(error, path, checkpoint)) from error
        self._paths = {self._loaded: self._paths[self._loaded], checkpoint: path}

    def _check_config(self, path: Path) -> None:
        theirs = read_config(self._settings, path)
        for field in dataclasses.fields(ModelConfig):
            ours, new = getattr(self._config, field.name), getattr(theirs, field.name)
            if field.name not in NOT_THE_NETWORK and new != ours:
                raise WeightError(f"{path / 'config.json'} is of another network: {field.name} is {_shown(new)}, and "
                                  f"{_shown(ours)} is served.")

    def load(self, checkpoint: str) -> None:
        """Read it, as it was checked, into the weights, which no step uses; those that sleep get it when they wake up.

        Raises LoadError; the weights are then neither the old nor the new ones.
        """
        path = self._paths.get(checkpoint)
        try:
            if path is None:
                path = resolve_checkpoint(self._settings.model, checkpoint)
            self._load(path)
        except Exception as error:
            raise LoadError(_told(error, path, checkpoint)) from error
        self._loaded, self._paths = checkpoint, {**self._paths, checkpoint: path}

    def _load(self, path: Path) -> None:
        self._loader.path = path
        if self.memory is None or self.memory.weights is None or self.memory.weights.is_mapped:
            self._loader.load()
        if self.pooler is not None:
            self.pooler.load(path, dummy=False)
        if self.balancer is not None:
            self.balancer.bring_home()
        self._synchronize()


def resolve_checkpoint(settings: ModelSettings, checkpoint: str) -> Path:
    """Where its files are on this machine. Raises HubError."""
    own = checkpoint == settings.model
    return hub.resolve_model(checkpoint, use_modelscope=settings.use_modelscope, cache_dir=settings.download_dir,
                             revision=settings.revision if own else None).path


def _told(error: Exception, path: Path | None, checkpoint: str) -> str:
    """One sentence for people, who know the files by what they gave."""
    message = describe(error)
    return message.replace(str(path), checkpoint) if path is not None and path.is_absolute() else message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
