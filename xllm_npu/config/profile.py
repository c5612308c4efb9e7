"""The latency that scheduling aims for."""

from __future__ import annotations

from pydantic import Field

from xllm_npu.config.section import Section

UNLIMITED_MS = 2**31 - 1


class ProfileSettings(Section):
    """Latency"""

    enable_latency_aware_schedule: bool = Field(
        default=False, description="bound each step by the time it is predicted to take"
    )
    max_global_ttft_ms: int = Field(
        default=UNLIMITED_MS,
        ge=1,
        le=UNLIMITED_MS,
        description="target for the time to the first token, of requests that name none",
    )
    max_global_tpot_ms: int = Field(
        default=UNLIMITED_MS,
        ge=1,
        le=UNLIMITED_MS,
        description="target for the time between tokens, of requests that name none",
    )
