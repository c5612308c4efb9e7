"""The attention backends' contract: they own how the cache is laid out and how queries read it.

One instance per worker, stateful across steps (workspaces, plans, graph-mode buffers). Sequence of calls:
`allocate_kv_caches` once; then for each step `prepare(metadata)` once and `forward(...)` once a layer.
Within one `forward`, K and V of all query tokens are written before any query reads, so a row may read blocks that
another row of the same step writes (prefix sharing inside a batch relies on this).

`PagedBackend` is what the runner knows. What `forward` takes depends on what a model caches: keys and values
(`AttentionBackend`) or latents (mla_base.MlaBackend).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from xllm_platform.base import GraphTasks

from xllm_models.forward_input import AttentionMetadata

# Memory for one cache: shape (blocks first) and dtype to a tensor. Not all of it need be backed: only the dummy, and
# the blocks that a step names while it runs.
NewCache = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One rank's attention shape."""

    num_layers: int
    num_heads: int  # H, this rank's
    num_kv_heads: int  # K, this rank's
    head_dim: int  # E
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, frozen=True)
class LayerAttention:
    """What differs between layers."""

    layer: int
    scale: float
    sliding_window: int = 0  # 0: none; w: a query at position p sees positions p-w+1..p
    softcap: float = 0.0  # 0: none; c: scores become c * tanh(score / c) before the softmax
    # [H] float32, this rank's: a score of each head that takes part in its softmax and has no value
    sinks: torch.Tensor | None = field(default=None, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """What a backend must be able to do beyond the ordinary (`PagedBackend.features`)."""
        used = {"softcap": self.softcap > 0, "sinks": self.sinks is not None}
        return frozenset(name for name in used if used[name])


def zeros(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A `NewCache` of the device's own memory, but for its first argument."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class PagedBackend(ABC):
    spec: Any  # AttentionSpec or MlaSpec
    features: frozenset[str] = frozenset()  # which of LayerAttention's extras it can do: softcap, sinks
    dtypes: frozenset[torch.dtype] = frozenset()  # what it computes in; empty: whatever the platform does
    head_sizes: frozenset[int] = frozenset()  # values of a head that it takes; empty: any
    # Whether `forward` may be captured in a graph: it reads what changes between steps from device memory, or launches
    # through `graph_tasks` what is told lengths by the host. Else it would replay with those of the capture.
    capture_safe: bool = False
    host_lengths: bool = False  # captured, it launches operators through `graph_tasks`, which must be there
    graph_tasks: GraphTasks | None = None  # set while graphs are captured
    slot_dtype: torch.dtype = torch.int64  # what it wants AttentionMetadata.slot_mapping in

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def kv_bytes_per_block(cls, spec: Any) -> int:
        """Bytes one block takes over all layers."""

    @classmethod
    @abstractmethod
    def num_kv_caches(cls, spec: Any) -> int:
        """Tensors that `allocate_kv_caches` makes, in all of which a block takes the same bytes."""

    @abstractmethod
    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        """Make (or have `new_cache` make) and bind the caches; block 0 is the dummy that padded rows write to.

        What can be touched is finite: zeros, or what a block held before.
        """

    def warmup(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Once after allocation: do what the first step would otherwise wait for."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> None:
        """Once a step, before the first layer."""

    @abstractmethod
    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """pairs [N, 2] int64 (source, destination): copy whole blocks in every layer, in order."""


class AttentionBackend(PagedBackend):
    """Caches every key/value head's K and V."""

    spec: AttentionSpec

    @classmethod
    def num_kv_caches(cls, spec: AttentionSpec) -> int:
        return 2 * spec.num_layers

    @abstractmethod
    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [T, H, E], key and value [T, K, E] -> [T, H*E]. Writes K and V, then attends (causal)."""
