"""What the scheduler is told once: limits the user set and facts the engine found. Frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerOptions:
    max_seqs: int  # sequences running at once: rows of the batch table
    max_tokens: int  # tokens in one step
    max_model_len: int
    num_blocks: int  # the dummy included
    block_size: int
    pooling: bool = False  # a prompt becomes a vector, and no token follows it
    rotary_switch: int = 0  # a sequence that grows longer is computed anew, and shares no blocks with shorter ones
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "decode_first"
    priority_strategy: str = "fcfs"
    enable_chunked_prefill: bool = True
    max_chunk: int = 0  # tokens of one prompt in one step; 0: no limit but max_tokens
    enable_prefix_cache: bool = True
    enable_in_batch_prefix_cache: bool = True
    prefix_seed: int = 1024
    prefill_gate: float = 0.95  # no admission while block usage is at least this
    enable_online_preempt_offline: bool = True
    enable_starve_prevent: bool = True
    starve_seconds: float = 1.0
    max_loras: int = 0  # different adapters in one step; 0: requests have none
    latency_aware: bool = False
    max_ttft_seconds: float = float("inf")  # latency budget of a step with prefill
    max_tpot_seconds: float = float("inf")  # of a step with decodes only
