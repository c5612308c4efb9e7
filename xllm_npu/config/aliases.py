"""Other names for settings: those that users of vLLM, SGLang and older launch files know.

An alias names one setting and may turn its value; it is taken wherever a setting's own name is (flag,
environment, JSON). Values are as given: strings from flags and the environment, JSON values from files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xllm_npu.config.errors import SettingsError

TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")
FALSE_WORDS = ("false", "f", "no", "n", "off", "0")


@dataclass(frozen=True, slots=True)
class Alias:
    """`convert` maps the given value to the settings it stands for; None: the same value under `target`."""

    target: str
    boolean: bool = False
    convert: Callable[[Any], dict[str, Any]] | None = None

    def resolve(self, value: Any) -> dict[str, Any]:
        return {self.target: value} if self.convert is None else self.convert(value)


def as_bool(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise SettingsError(f"takes true or false, got {value!r}")


def _opposite(target: str) -> Alias:
    return Alias(target, boolean=True, convert=lambda value: {target: not as_bool(value)})


def _mix_batch(value: Any) -> dict[str, Any]:
    return {"scheduling_policy": "decode_first" if as_bool(value) else "prefill_first"}


def _mix_scheduler(value: Any) -> dict[str, Any]:
    return {"scheduling_policy": "unified"} if as_bool(value) else {}


def _sleep_mode(value: Any) -> dict[str, Any]:
    return {"enable_vmm_weights": True, "enable_vmm_kvcache": True} if as_bool(value) else {}


def _devices(value: Any) -> dict[str, Any]:
    """'npu:0' is a platform and an index; the plural is older than one process a device."""
    kind, _, index = str(value).partition(":")
    if "," in str(value):
        raise SettingsError(f"takes one device in this version, such as npu:0, got {value!r}")
    if not index:
        return {"platform": kind}
    return {"platform": kind, "device_id": index}


_TASKS = {
    "auto": {}, "generate": {"runner": "generate"}, "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"}, "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"}, "rerank": {"runner": "pooling"},
}


def _task(value: Any) -> dict[str, Any]:
    word = str(value).strip().lower()
    if word not in _TASKS:
        raise SettingsError(f"takes one of {', '.join(_TASKS)}, got {value!r}")
    return dict(_TASKS[word])


# The C++ runtime's names for what needs no C++ here; vLLM's for its own networks.
_MODEL_IMPLS = {"": "auto", "python": "auto", "py": "auto", "vllm": "native"}

ALIASES: dict[str, Alias] = {
    # vLLM
    "tensor_parallel_size": Alias("tp_size"),
    "tp": Alias("tp_size"),
    "task": Alias("runner", convert=_task),
    "override_pooler_config": Alias("pooler_config"),
    "data_parallel_size": Alias("dp_size"),
    "dp": Alias("dp_size"),
    "max_num_seqs": Alias("max_seqs_per_batch"),
    "max_num_batched_tokens": Alias("max_tokens_per_batch"),
    "gpu_memory_utilization": Alias("max_memory_utilization"),
    "kv_cache_memory_bytes": Alias("max_cache_size"),
    "enable_prefix_caching": Alias("enable_prefix_cache", boolean=True),
    "async_scheduling": Alias("enable_schedule_overlap", boolean=True),
    "enforce_eager": _opposite("enable_graph"),
    "enable_sleep_mode": Alias("enable_vmm_weights", boolean=True, convert=_sleep_mode),
    "cudagraph_capture_sizes": Alias("graph_batch_sizes"),
    "cuda_graph_sizes": Alias("graph_batch_sizes"),
    "seed": Alias("random_seed"),
    "enable_log_requests": Alias("enable_request_logging", boolean=True),
    "disable_log_requests": _opposite("enable_request_logging"),
    "uvicorn_log_level": Alias("log_level"),
    "max_num_queued_reqs": Alias("max_queued_requests"),
    # SGLang
    "model_path": Alias("model"),
    "context_length": Alias("max_model_len"),
    "mem_fraction_static": Alias("max_memory_utilization"),
    "max_running_requests": Alias("max_seqs_per_batch"),
    "chunked_prefill_size": Alias("max_tokens_per_chunk_for_prefill"),
    "disable_radix_cache": _opposite("enable_prefix_cache"),
    "disable_overlap_schedule": _opposite("enable_schedule_overlap"),
    # Launch files for the C++ runtime
    "use_mix_scheduler": Alias("scheduling_policy", boolean=True, convert=_mix_scheduler),
    "enable_mix_batch": Alias("scheduling_policy", boolean=True, convert=_mix_batch),
    "devices": Alias("platform", convert=_devices),
}


def translate_value(name: str, value: Any) -> tuple[str, Any]:
    """A setting's name with another system's value: `scheduling_policy=fcfs`, `generation_config=vllm`."""
    word = value.strip().lower() if isinstance(value, str) else value
    if name == "scheduling_policy" and word in ("fcfs", "priority"):
        return "priority_strategy", word
    if name == "generation_config" and word == "vllm":
        return name, "none"
    if name == "model_impl":
        return name, _MODEL_IMPLS.get(word, value)
    return name, value
