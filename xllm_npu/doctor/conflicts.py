"""Environment variables that contradict a setting, or that were set to find a fault and then forgotten.

Reads the environment only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xllm_npu.config.settings import flat_values
from xllm_npu.doctor.finding import Finding, note, problem
from xllm_npu.doctor.machine import Machine

if TYPE_CHECKING:
    from xllm_npu.config.settings import Settings

VIRTUAL_MEMORY = ("enable_virtual_memory", "enable_vmm_kvcache", "enable_vmm_weights")
HCCL_SECONDS = 120, 7200  # what HCCL_CONNECT_TIMEOUT takes


def examine_conflicts(machine: Machine, settings: Settings) -> Iterator[Finding]:
    environment, graphs = machine.environment, settings.execution.enable_graph
    if environment.get("ASCEND_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield _blocking(graphs)
    if _segments(environment.get("PYTORCH_NPU_ALLOC_CONF", "")) and uses_virtual_memory(flat_values(settings)):
        yield problem(
            "env.segments", "environment", "PYTORCH_NPU_ALLOC_CONF has expandable_segments:True",
            "the allocator then maps physical pages itself, which it cannot do beside this program's own pages",
            "take it out, or turn the virtual memory settings off",
        )  # fmt: skip
    if environment.get("TASK_QUEUE_ENABLE", "1") == "0":
        yield note(
            "env.task-queue", "environment", "TASK_QUEUE_ENABLE=0", "every operator is launched by the thread that "
            "prepares the next, and decoding waits for the host", "unset it, or set 1",
        )  # fmt: skip
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield note(
            "env.interpret", "environment", f"TRITON_INTERPRET={environment['TRITON_INTERPRET']}",
            "Triton kernels run line by line in Python", "unset it",
        )  # fmt: skip
    if (level := environment.get("ASCEND_GLOBAL_LOG_LEVEL", "3")) in ("0", "1"):
        yield note(
            "env.log-level", "environment", f"ASCEND_GLOBAL_LOG_LEVEL={level}",
            "CANN writes a log line for every call, which costs much of the speed", "unset it, or set 3",
        )  # fmt: skip
    yield from _timeout(environment.get("HCCL_CONNECT_TIMEOUT"))


def uses_virtual_memory(values: dict[str, object]) -> bool:
    """Whether settings, by flat name, ask for memory pages of our own. Versions without them ask for none."""
    return any(values.get(name) for name in VIRTUAL_MEMORY)


def _segments(configuration: str) -> bool:
    pairs = (pair.partition(":") for pair in configuration.split(","))
    return any(name.strip() == "expandable_segments" and value.strip().lower() == "true" for name, _, value in pairs)


def _blocking(graphs: bool) -> Finding:
    found = "ASCEND_LAUNCH_BLOCKING=1"
    if graphs:
        return problem(
            "env.blocking-graphs", "environment", f"{found} with --enable-graph",
            "it waits for the device after every launch, which is not allowed while a graph is captured",
            "unset it, or leave --enable-graph out",
        )  # fmt: skip
    return note(
        "env.blocking", "environment", found, "the host waits for every operator; it is for finding faults", "unset it"
    )


def _timeout(text: str | None) -> Iterator[Finding]:
    if text is None:
        return
    low, high = HCCL_SECONDS
    if not text.isdigit() or not low <= int(text) <= high:
        yield problem(
            "env.connect-timeout", "environment", f"HCCL_CONNECT_TIMEOUT={text}", f"HCCL takes {low} to {high} seconds",
            "unset it, or give one of these",
        )  # fmt: skip
