"""How much KV cache there is and how it is shared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xllm_npu.config.section import Section
from xllm_npu.config.values import ByteCount, CaseFolded


class KvCacheSettings(Section):
    """KV cache"""

    block_size: int = Field(default=128, ge=1, le=4096, description="tokens in one block")
    max_cache_size: ByteCount = Field(
        default=0, ge=0, le=2**50, description="KV cache size, such as 2GiB; 0: what max-memory-utilization leaves"
    )
    max_memory_utilization: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="share of the device's memory that weights, activations and KV cache may fill; with vmm-elastic "
        "only where it is set, and 0: no such limit",
    )
    kv_cache_dtype: Annotated[Literal["auto"], CaseFolded] = Field(
        default="auto", description="dtype of cached keys and values; auto: the model's"
    )
    enable_prefix_cache: bool = Field(default=True, description="reuse the KV blocks of equal prompt beginnings")
    # Off in the reference. On here: two requests of one batch with an equal prefix would compute it twice.
    enable_in_batch_prefix_cache: bool = Field(
        default=True, description="share prefixes between requests that are prefilled in the same step"
    )
    enable_vmm_kvcache: bool = Field(default=False, description="keep the KV cache in virtual memory")
    enable_vmm_weights: bool = Field(
        default=False, description="keep the weights in virtual memory, so that the model can sleep"
    )
    vmm_elastic: bool = Field(
        default=False, description="take memory for the KV cache as requests need it, and give it back after them; "
        "weights in virtual memory need it, unless the KV cache is there too"
    )
    vmm_memory_reserve_bytes: ByteCount = Field(
        default=0, ge=0, le=2**50,
        description="memory that elastic virtual memory leaves free beyond what steps have needed",
    )
    phy_page_granularity_size: ByteCount = Field(
        default=2 * 2**20, ge=4096, le=2**30, description="bytes of a physical page of virtual memory"
    )
    xxh3_128bits_seed: int = Field(
        default=1024, ge=0, le=2**64 - 1, description="seed of the block hash; servers that exchange KV need the same"
    )
