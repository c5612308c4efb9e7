"""Our paged attention as an attention function of transformers' models, and what their layers ask of it.

Two functions are registered with transformers. The probe records each call of one forward pass: shapes, scale, window
and whatever else the layer passes; whether that can be served is decided there, before anything runs for real. The
paged one hands the n-th call of a forward pass to the backend as layer n. Both find their run in a context variable,
so that several models of one process do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from xllm_models.attention.base import AttentionBackend, LayerAttention

PAGED, PROBE = "xllm_paged", "xllm_probe"
_UNSERVED = -1  # in place of a window
_HARMLESS = ("position_ids", "cache_position")  # tensors that layers pass on and attention does not need
_LATE = 5000  # a position late enough for every pattern but a sliding window to show


class UnservedAttention(ValueError):
    """A layer asks for attention that the paged cache cannot give; the message says what."""


@dataclass(slots=True, frozen=True)
class LayerCall:
    """What one attention call of a forward pass looks like."""

    layer: int | None  # the module's own layer_idx, where it has one
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int  # 0: none
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [H], the module's parameter

    @property
    def head_dim(self) -> int:
        """The wider of K and V."""
        return max(self.key_dim, self.value_dim)


class PagedRun:
    """Hands the calls of a forward pass to the backend, in order.

    Where layers differ, the cache has the widest head and the most key heads: heads are padded with zeros, and key
    heads repeated, which changes no result.
    """

    def __init__(self, layers: list[LayerAttention], backend: AttentionBackend) -> None:
        self._layers, self._backend = layers, backend
        self._next = 0

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [1, H, T, E], key and value [1, K, T, E] -> [1, T, H, E of the value]."""
        spec, layer, given = self._backend.spec, self._layers[self._next], value.shape[3]
        self._next += 1
        query, key, value = (_widened(part[0].transpose(0, 1), spec.head_dim) for part in (query, key, value))
        if key.shape[1] != spec.num_kv_heads:
            times = spec.num_kv_heads // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        out = self._backend.forward(layer, query, key, value)
        return out.view(1, query.shape[0], query.shape[1], spec.head_dim)[..., :given]


_run: ContextVar[PagedRun | None] = ContextVar("run", default=None)
_probed: ContextVar[list[LayerCall] | None] = ContextVar("probed", default=None)


@contextmanager
def paged(run: PagedRun) -> Iterator[None]:
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


@contextmanager
def probing() -> Iterator[list[LayerCall]]:
    """The list that the calls of a forward pass under PROBE are appended to."""
    calls: list[LayerCall] = []
    token = _probed.set(calls)
    try:
        yield calls
    finally:
        _probed.reset(token)


def _widened(part: torch.Tensor, width: int) -> torch.Tensor:
    """[T, heads, E] with E padded to the cache's width."""
    return part if part.shape[2] == width else pad(part, (0, width - part.shape[2]))


def _paged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    run = _run.get()
    assert run is not None, "the model runs through TransformersModel.forward only"
    return run.attend(query, key, value), None


def _probe_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, is_causal: bool | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:
    calls = _probed.get()
    assert calls is not None, "probing() is open around a probe"
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnservedAttention(f"its attention takes keys of another length than its queries ({list(key.shape)})")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnservedAttention("its attention looks ahead")
    strange = [name for name, value in more.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
    if strange:
        raise UnservedAttention(f"its attention depends on more than queries and keys ({', '.join(strange)})")
    calls.append(LayerCall(
        layer=getattr(module, "layer_idx", None), num_heads=query.shape[1], num_kv_heads=key.shape[1],
        key_dim=key.shape[3], value_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
        sliding_window=_window(attention_mask, sliding_window), softcap=float(softcap or 0.0), sinks=s_aux,
    ))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _window(mask: torch.Tensor | None, passed: int | None) -> int:
    """The layer's window. The mask decides, since it does in transformers' own attention; a layer that gets none says
    it itself.
    """
    if mask is None:
        return int(passed or 0)
    if mask.dtype != torch.int64 or mask.ndim != 4:
        raise UnservedAttention("its attention mask carries a bias of its own, such as ALiBi")
    window = int(mask.flatten()[0])
    if window == _UNSERVED:
        raise UnservedAttention("its attention pattern is neither causal nor a sliding window")
    return window


def _probe_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None, device: torch.device | str = "cpu", **_: Any,
) -> torch.Tensor:
    """In place of a mask: [batch, 1, q, kv] int64, the sliding window everywhere, 0 for none, or _UNSERVED.

    A model may make masks that no layer takes.
    """
    window = int(local_size or 0)
    if not _is_causal(mask_function, window):
        window = _UNSERVED
    return torch.full((batch_size, 1, q_length, kv_length), window, device=device)


def _is_causal(mask_function: Callable[..., torch.Tensor], window: int) -> bool:
    """Whether it shows exactly the keys up to the query's own, at most `window` of them unless that is 0."""
    zero = torch.zeros((), dtype=torch.int64)
    for position in sorted({0, 1, 7, _LATE, *((window - 1, window, window + 1, 2 * window + 5) if window else ())}):
        keys = torch.arange(position + 3)
        expected = keys <= position
        if window:
            expected &= keys > position - window
        shown = mask_function(zero, zero, torch.tensor(position), keys)
        if not torch.equal(shown.expand_as(expected), expected):
            return False
    return True


AttentionInterface.register(PAGED, _paged_attention)
AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
