"""Where and how the model runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from xllm_npu.config.section import Section
from xllm_npu.config.values import CaseFolded, Counts, Metavar


class ExecutionSettings(Section):
    """Execution"""

    platform: Annotated[str, CaseFolded, Metavar("NAME")] = Field(
        default="auto",
        min_length=1,
        description="npu, cuda, cpu or an installed plugin's; auto: the first that works",
    )
    device_id: int = Field(default=-1, ge=-1, le=1023, description="index of the device; -1: the first visible one")
    # The reference has a flag of this name for its RPC threads; here it is what torch and numba compute with.
    num_threads: int = Field(
        default=0, ge=0, le=4096, description="CPU threads for computation; 0: one for each usable core"
    )
    random_seed: int = Field(
        default=-1, ge=-1, le=2**63 - 1, description="seed for requests that give none; -1: a new one at each start"
    )
    attention_backend: Annotated[str, CaseFolded, Metavar("NAME")] = Field(
        default="auto", min_length=1, description="attention implementation; auto: the platform's first choice"
    )
    enable_graph: bool = Field(default=False, description="capture decode steps as graphs (cpu: compile them)")
    graph_batch_sizes: Counts = Field(default=(), description="batch sizes to capture; default: the platform's")
    enable_prefill_piecewise_graph: bool = Field(
        default=False, description="capture steps with prompts too, between their attentions; needs enable_graph"
    )
    max_tokens_for_graph_mode: int = Field(
        default=2048, ge=1, le=2**24, description="steps with more tokens run eagerly"
    )

    enable_shm: bool = Field(default=True, description="pass steps to workers of this machine by shared memory")
    input_shm_size: int = Field(default=64, ge=1, le=65536, description="MiB of that shared memory, for each engine")

    @field_validator("graph_batch_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 1 <= size <= 65536 for size in sizes):
            raise ValueError(f"takes batch sizes from 1 to 65536, got {','.join(map(str, sizes))}")
        return tuple(sorted(set(sizes)))
