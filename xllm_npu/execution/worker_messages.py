"""What worker processes tell their engine, beside computing: msgspec structs, one a message.

Steps go the other way as `StepInput` through step_channel.py, `WorkerProfile` and the messages about adapters and
weights among them; `WorkerStop` ends their stream.
"""

from __future__ import annotations

import msgspec

from xllm_npu.state.messages import WeightLoad


class WorkerStop(msgspec.Struct, tag=True, array_like=True):
    """No step follows."""


class WorkerProfile(msgspec.Struct, tag=True, array_like=True):
    """Trace the steps that follow into `directory`; without one: write what was traced."""

    directory: str


class WorkerLoadLora(msgspec.Struct, tag=True, array_like=True):
    """Read an adapter, together with the engine's other ranks; they agree among themselves whether all could."""

    lora_id: int
    path: str


class WorkerUnloadLora(msgspec.Struct, tag=True, array_like=True):
    """Forget an adapter."""

    lora_id: int


class WorkerCheckWeights(msgspec.Struct, tag=True, array_like=True):
    """Whether this checkpoint could be loaded, beside the steps that follow. Answered by a `WorkerAnswer`."""

    checkpoint: str


class WorkerLoadWeights(msgspec.Struct, tag=True, array_like=True):
    """Load this checkpoint over the weights. Answered by a `WorkerAnswer`."""

    checkpoint: str


class WorkerAnswer(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """One for each message about weights."""

    rank: int
    error: str = ""  # a sentence for people: why it did not come about


class WorkerReady(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Loaded, warm, and waiting for steps."""

    rank: int  # among the engine's tensor-parallel ranks
    pid: int
    device: str
    weights: WeightLoad
    load_seconds: float
    memory: str = ""  # endpoint that takes calls about its memory


class WorkerStatus(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Sent several times a second for as long as the process runs, whatever its computing thread does."""

    rank: int
    entered: int  # collectives, see xllm_platform.progress
    left: int


class WorkerFailed(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The process is about to exit. One sentence for people; the traceback unless the error is one of ours."""

    rank: int
    message: str
    traceback: str = ""


WorkerReport = WorkerReady | WorkerStatus | WorkerAnswer | WorkerFailed
