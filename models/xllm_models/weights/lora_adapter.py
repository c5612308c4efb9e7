"""A LoRA adapter as PEFT saves it: a directory with adapter_config.json and adapter_model.safetensors.

What this package cannot apply exactly as it was trained is refused, before a byte of tensor data is read. Errors name
files and modules, and no path. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
PREFIX = "base_model.model."
DTYPES = ("F32", "BF16", "F16")
# Keys of adapter_config.json whose features change what an adapter computes, and what they are called.
REFUSED = {
    "use_dora": "DoRA (use_dora)", "modules_to_save": "modules_to_save", "fan_in_fan_out": "fan_in_fan_out",
    "lora_bias": "lora_bias", "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern",
    "layer_replication": "layer_replication", "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices", "use_qalora": "QALoRA (use_qalora)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
}  # fmt: skip
# Variants of LoRA have keys like "use_dora" and "arrow_config"; these are none.
HARMLESS = frozenset({"use_rslora", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config",
                      "runtime_config"})
PLAIN_STARTS = ("gaussian", "eva", "orthogonal")  # of training; others change the model's own weights too
MANY = 3  # names that an error lists
Shapes = Mapping[str, tuple[int, int]]  # module -> (out, in) of its matrix


class LoraError(ValueError):
    """The adapter cannot be served; the message says what is wrong with it."""


@dataclass(slots=True, frozen=True)
class LoraConfig:
    rank: int
    scale: float  # of B A
    targets: tuple[str, ...]  # () where the configuration gives a pattern instead of names


@dataclass(slots=True, frozen=True)
class LoraFiles:
    config: LoraConfig
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> A [rank, in], B [out, rank], as in the file


def read_lora(directory: Path, shapes: Shapes, all_modules: frozenset[str], max_rank: int) -> LoraFiles:
    """`shapes`: modules that an adapter may change. `all_modules`: those the model has. Raises LoraError."""
    try:
        if not directory.is_dir():
            raise LoraError("There is no such directory on the server.")
        config = read_lora_config(directory, max_rank)
        return LoraFiles(config, _read_weights(directory, config, shapes, all_modules))
    except (OSError, ValueError) as error:
        if isinstance(error, LoraError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise LoraError(f"The adapter's files cannot be read: {reason}.") from error


def read_lora_config(directory: Path, max_rank: int) -> LoraConfig:
    """adapter_config.json. Raises LoraError, OSError."""
    raw = _read_json(directory / CONFIG_NAME)
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise LoraError(f"{CONFIG_NAME}: peft_type is {_shown(kind)}; only LORA is supported.")
    for key, name in REFUSED.items():
        if raw.get(key):
            raise LoraError(f"{CONFIG_NAME}: {name} is not supported.")
    for key, value in raw.items():
        if value and key not in HARMLESS and (key.startswith("use_") or key.endswith("_config")):
            raise LoraError(f"{CONFIG_NAME}: {_shown(key)} is not supported.")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start not in PLAIN_STARTS:
        raise LoraError(f"{CONFIG_NAME}: init_lora_weights is {_shown(start)}, which changes the model's own weights. "
                        "Save the adapter with path_initial_model_for_weight_conversion.")
    if raw.get("bias", "none") != "none":
        raise LoraError(f"{CONFIG_NAME}: bias is {_shown(raw['bias'])}; only none is supported.")
    rank, alpha = raw.get("r"), raw.get("lora_alpha", raw.get("r"))
    if type(rank) is not int or rank < 1:
        raise LoraError(f"{CONFIG_NAME}: r must be a number of at least 1, got {_shown(rank)}.")
    if rank > max_rank:
        raise LoraError(f"{CONFIG_NAME}: r is {rank}, and this server takes ranks up to {max_rank} (--max_lora_rank).")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise LoraError(f"{CONFIG_NAME}: lora_alpha must be a number, got {_shown(alpha)}.")
    scale = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
    return LoraConfig(rank, scale, _targets(raw.get("target_modules")))


def _targets(given: Any) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise LoraError(f"{CONFIG_NAME}: target_modules must be a list of names or a pattern, got {_shown(given)}.")
    return tuple(given)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise LoraError(f"The directory has no {file.name}.")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise LoraError(f"{file.name} is larger than {MAX_CONFIG_BYTES} bytes.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoraError(f"{file.name} is not JSON.") from error
    if not isinstance(raw, dict):
        raise LoraError(f"{file.name} must hold a JSON object.")
    return raw


def _read_weights(directory: Path, config: LoraConfig, shapes: Shapes, all_modules: frozenset[str],
                  ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    file = directory / WEIGHTS_NAME
    if not file.is_file():
        other = any((directory / name).is_file() for name in ("adapter_model.bin", "adapter_model.pt"))
        hint = " Pickle files are refused: loading one can execute code of its author's." if other else ""
        raise LoraError(f"The directory has no {WEIGHTS_NAME}.{hint}")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            pairs: dict[str, dict[str, str]] = {}
            for name in opened.keys():  # noqa: SIM118  # no mapping
                module, side = _parse(name, shapes, all_modules)
                pairs.setdefault(module, {})[side] = name
            _check_pairs(pairs, config)
            for module, sides in pairs.items():
                rows, columns = shapes[module]
                _check(opened, sides["A"], (config.rank, columns))
                _check(opened, sides["B"], (rows, config.rank))
            return {module: (opened.get_tensor(sides["A"]), opened.get_tensor(sides["B"]))
                    for module, sides in pairs.items()}
    except SafetensorError as error:
        raise LoraError(f"{WEIGHTS_NAME} is damaged or truncated.") from error


def _parse(name: str, shapes: Shapes, all_modules: frozenset[str]) -> tuple[str, str]:
    """A tensor's module, and A or B."""
    module, dot, kind = name.removeprefix(PREFIX).rpartition(".lora_")
    if kind.startswith("embedding_"):
        raise LoraError(f"{WEIGHTS_NAME}: {_shown(module)} is an embedding, which an adapter cannot change here.")
    if kind.startswith("magnitude_vector"):
        raise LoraError(f"{WEIGHTS_NAME}: {_shown(module)} has a DoRA magnitude, which is not supported.")
    if not dot or kind not in ("A.weight", "B.weight"):
        raise LoraError(f"{WEIGHTS_NAME}: {_shown(name)} is no LoRA matrix; only MODULE.lora_A.weight and "
                        "MODULE.lora_B.weight are supported.")
    if module not in shapes:
        if module in all_modules or ".experts" in module:
            raise LoraError(f"{WEIGHTS_NAME}: adapters cannot change {_shown(module)}; they can change the linear "
                            "layers of attention and of dense MLPs, no experts, embeddings, norms or output layer.")
        raise LoraError(f"{WEIGHTS_NAME}: the model has no module {_shown(module)}. Is it an adapter of another model?")
    return module, kind[0]


def _check_pairs(pairs: Mapping[str, Mapping[str, str]], config: LoraConfig) -> None:
    if not pairs:
        raise LoraError(f"{WEIGHTS_NAME} holds no tensors.")
    for module, sides in pairs.items():
        if len(sides) != 2:
            raise LoraError(f"{WEIGHTS_NAME}: {module} has lora_{min(sides)} and no lora_{'BA'[min(sides) == 'B']}.")
    absent = [name for name in config.targets if not any(f".{module}".endswith(f".{name}") for module in pairs)]
    if absent:
        raise LoraError(f"{CONFIG_NAME}: target_modules has {', '.join(map(_shown, absent[:MANY]))}, of which "
                        f"{WEIGHTS_NAME} has nothing.")


def _check(opened: Any, name: str, expected: tuple[int, int]) -> None:
    part = opened.get_slice(name)
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    if shape != expected:
        raise LoraError(f"{WEIGHTS_NAME}: {name} is {list(shape)}, and the model needs {list(expected)}.")
    if dtype not in DTYPES:
        raise LoraError(f"{WEIGHTS_NAME}: {name} has dtype {dtype}; supported: {', '.join(DTYPES)}.")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
