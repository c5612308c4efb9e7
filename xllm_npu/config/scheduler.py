"""What may run in one step, and who goes first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xllm_npu.config.section import Section
from xllm_npu.config.values import CaseFolded, Metavar, TokenCount

SchedulingPolicy = Annotated[str, CaseFolded, Metavar("NAME")]  # open: a plugin may bring its own
PriorityStrategy = Annotated[Literal["fcfs", "priority", "deadline", "sjf", "density", "urgency"], CaseFolded]


class SchedulerSettings(Section):
    """Scheduler"""

    scheduling_policy: SchedulingPolicy = Field(
        default="decode_first",
        min_length=1,
        description="which stage gets the step's budget first: decode_first, prefill_first, unified (one list by "
        "urgency), or a plugin's policy",
    )
    priority_strategy: PriorityStrategy = Field(default="fcfs", description="order of waiting requests")
    max_tokens_per_batch: TokenCount = Field(
        default=10240,
        ge=1,
        le=2**24,
        description="tokens in one step, prefill and decode together (cpu: 1024 unless set)",
    )
    max_seqs_per_batch: int = Field(default=1024, ge=1, le=65536, description="sequences in one step")
    enable_chunked_prefill: bool = Field(default=True, description="split long prompts over several steps")
    max_tokens_per_chunk_for_prefill: TokenCount = Field(
        default=-1, ge=-1, le=2**24, description="tokens of one prompt in one step; -1: max-tokens-per-batch"
    )
    prefill_scheduling_memory_usage_threshold: float = Field(
        default=0.95, gt=0, le=1, description="share of used KV blocks above which no new prompt starts"
    )
    # Off in the reference. On here: without it the device waits while the host prepares the next step.
    enable_schedule_overlap: bool = Field(
        default=True, description="prepare the next step while the device runs this one"
    )
    enable_online_preempt_offline: bool = Field(default=True, description="online requests may push out offline ones")
    enable_starve_prevent: bool = Field(default=True, description="requests that have waited too long go first")
    starve_threshold: float = Field(default=1.0, ge=0, le=1e6, description="seconds of waiting that are too long")
