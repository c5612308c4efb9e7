"""Who goes first among equals: the priority strategies, each a key (smaller runs first).

Every key is fixed at arrival, so a waiting queue can be a heap; urgency that grows with time keeps its order
because all deadlines approach at the same speed.
"""

from __future__ import annotations

from collections.abc import Callable

from xllm_npu.state.messages import AddRequest

NO_DEADLINE = float("inf")


def ttft_deadline(message: AddRequest) -> float:
    """Wall-clock time (time.time()) by which the first token is due; infinite without an SLO."""
    if message.ttft_slo_ms:
        return message.arrival_time + message.ttft_slo_ms / 1e3
    if message.ttlt_slo_ms:
        return message.arrival_time + message.ttlt_slo_ms / 1e3
    return NO_DEADLINE


def _fcfs(message: AddRequest) -> float:
    return 0.0


def _priority(message: AddRequest) -> float:
    return float(message.priority)


def _shortest_job(message: AddRequest) -> float:
    return len(message.prompt) / 4


def _density(message: AddRequest) -> float:
    """Value per token of work: priority 0 is worth 1, each step of priority halves it."""
    tokens = len(message.prompt) / 4 + (message.params.max_tokens or 256)
    return -(2.0 ** -max(-64, min(64, message.priority))) / tokens


def _urgency(message: AddRequest) -> float:
    """The deadline, brought forward by what the prompt's prefill is likely to take (0.1 ms a token)."""
    deadline = ttft_deadline(message)
    return deadline if deadline == NO_DEADLINE else deadline - len(message.prompt) / 4 * 1e-4


STRATEGIES: dict[str, Callable[[AddRequest], float]] = {
    "fcfs": _fcfs,
    "priority": _priority,
    "deadline": ttft_deadline,
    "sjf": _shortest_job,
    "density": _density,
    "urgency": _urgency,
}


def get_strategy(name: str) -> Callable[[AddRequest], float]:
    if name not in STRATEGIES:
        raise ValueError(f"unknown priority strategy {name!r}; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
