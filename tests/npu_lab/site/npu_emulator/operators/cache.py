"""Writing to and reading from the paged cache."""

from __future__ import annotations

import torch
from npu_emulator.registry import npu_operator, require, require_dtype, require_shape

DUMMY_BLOCK = 0  # padded rows all write here; elsewhere a slot written twice in a call has an undefined value


@npu_operator("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, *, cache_mode="PA_NZ", **rest):
    """key and value [T, K, E] to slots [T] of caches [blocks, block_size, K, E]."""
    require(not any(v is not None for v in rest.values()), f"{', '.join(rest)}: not modelled")
    require(cache_mode == "Norm", f"cache_mode {cache_mode!r}: only caches of plain layout (Norm) are modelled")
    require_dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
    require_shape("slot_mapping", slot_mapping, key.shape[0])
    blocks, block_size = key_cache.shape[:2]
    for new, cache, name in ((key, key_cache, "key"), (value, value_cache, "value")):
        require_dtype(name, new, cache.dtype)
        require(cache.dim() == 4 and tuple(cache.shape) == (blocks, block_size, *new.shape[1:]),
                f"{name} {list(new.shape)} does not fit its cache {list(cache.shape)}")
        require(cache.is_contiguous(), f"{name}_cache is not contiguous, so it would be written to a copy")
    slots = slot_mapping.long()
    require(((slots >= 0) & (slots < blocks * block_size)).all(), "a slot is outside of the cache")
    used = slots[slots >= (DUMMY_BLOCK + 1) * block_size]
    require(used.unique().numel() == used.numel(), "two tokens have the same slot")
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


@npu_operator("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, key, value, *, is_seq_lens_cumsum=False, **rest):
    """The keys and values of every sequence, one after another, into key and value [sum of lengths, K, E]."""
    require(not any(v is not None for v in rest.values()), f"{', '.join(rest)}: not modelled")
    require_dtype("block_tables", block_tables, torch.int32)
    require_dtype("seq_lens", seq_lens, torch.int32)
    lengths = torch.diff(seq_lens) if is_seq_lens_cumsum else seq_lens
    begin, block_size = 0, key_cache.shape[1]
    for row, length in zip(block_tables, lengths.tolist()):
        blocks = row[: -(-length // block_size)].long()
        for cache, out in ((key_cache, key), (value_cache, value)):
            out[begin : begin + length] = cache[blocks].flatten(0, 1)[:length]
        begin += length
    require(begin == key.shape[0], f"the lengths' sum {begin} is not key's {key.shape[0]} rows")


@npu_operator("_npu_reshape_and_cache", "atb")
def reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """ATB's older form of npu_scatter_pa_kv_cache."""
    require_dtype("slot_indices", slot_indices, torch.int32)
    scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices, cache_mode="Norm")
