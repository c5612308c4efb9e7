"""Kernels with one place changed fail the comparison that the others pass, so the comparison would notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from xllm_kernels_npu import kv_store, mla_decode, paged_decode, paged_prefill, rms_norm

from tests.npu_lab.kernels.mutation import mutated
from tests.npu_lab.kernels.numbers import random, same
from tests.npu_lab.kernels.pages import Pages, queries

pytestmark = pytest.mark.npu_lab
LENGTHS = [3, 40, 130]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def check_rms_norm(module: ModuleType, device: torch.device) -> None:
    x, weight = random((5, 100), torch.float32, device), random((100,), torch.float32, device)
    same(module.rms_norm(x, weight, 0.1), rms_norm.rms_norm_reference(x.cpu(), weight.cpu(), 0.1))


def check_store(module: ModuleType, device: torch.device) -> None:
    new = [random((4, heads, 20), torch.float32, device)[:, :3] for heads in (3, 4)]  # rows of different strides
    caches = [torch.zeros(3, 16, 3, 20, device=device) for _ in "kv"]
    slots = torch.tensor([16, 19, 40, 33])
    expected = [cache.cpu() for cache in caches]
    module.kv_store(*new, *caches, slots.to(device))
    for one, cache, wanted in zip(new, caches, expected):
        kv_store.kv_store_reference(one.cpu(), wanted, slots)
        same(cache, wanted)


def check_decode(module: ModuleType, device: torch.device) -> None:
    pages = Pages.filled(LENGTHS, 32, (2, 20), torch.float32, device)
    query, _ = queries([1] * 3, 6, 20, torch.float32, device)
    start, sinks = torch.arange(4), random((6,), torch.float32, device)
    arguments = pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens
    for splits in (1, 2):
        for window in (0, 35):
            found = module.paged_decode(query, *arguments, 0.5, window, 2.0, sinks, splits)
            same(found, paged_decode.paged_attention_reference(
                query.cpu(), *pages.on_host(), start, 0.5, window, 2.0, sinks.cpu()))


def check_prefill(module: ModuleType, device: torch.device) -> None:
    counts = [3, 35, 70]
    pages = Pages.filled(LENGTHS, 32, (2, 20), torch.float32, device)
    query, start = queries(counts, 6, 20, torch.float32, device)
    sinks = random((6,), torch.float32, device)
    arguments = pages.key_cache, pages.value_cache, pages.block_table, start, pages.seq_lens
    for window in (0, 35):
        found = module.paged_prefill(query, *arguments, 0.5, window, 2.0, sinks)
        same(found, paged_decode.paged_attention_reference(
            query.cpu(), *pages.on_host(), start.cpu(), 0.5, window, 2.0, sinks.cpu()))


def check_mla(module: ModuleType, device: torch.device) -> None:
    pages = Pages.filled(LENGTHS, 32, (28,), torch.float32, device)
    query = random((3, 20, 28), torch.float32, device).split((20, 8), -1)
    cache, _, table, lengths = pages.on_host()
    expected = mla_decode.mla_decode_reference(*(part.cpu() for part in query), cache, table, lengths, 0.3)
    for splits in (1, 2):
        same(module.mla_decode(*query, pages.key_cache, pages.block_table, pages.seq_lens, 0.3, splits), expected)


CHECKS: dict[ModuleType, Callable[[ModuleType, torch.device], None]] = {
    rms_norm: check_rms_norm, kv_store: check_store, paged_decode: check_decode, paged_prefill: check_prefill,
    mla_decode: check_mla,
}
MUTATIONS: list[tuple[ModuleType, str, str]] = [
    (rms_norm, "/ WIDTH + eps)\n            gain", "/ TILE + eps)\n            gain"),
    (kv_store, "value_stride + first", "key_stride"),
    (kv_store, "tl.load(slots + token)", "tl.load(slots)"),
    (paged_decode, "tl.where(seen[None, :], scores, HIDDEN)", "scores"),  # no mask
    (paged_decode, "position + lane >= length - window", "position + lane > length - window"),
    (paged_decode, "there = (position + lane < length)[:, None] & ", "there = "),  # reads what nobody wrote
    (paged_decode, "position // BLOCK_SIZE)", "0)"),
    (paged_decode, "head * GROUP_HEADS", "head"),
    (paged_decode, "result * fade[:, None] + ", "result + "),
    (paged_decode, "if split == 0:", "if split >= 0:"),
    (paged_decode, "tl.load(sums + place + split) * weights", "tl.load(sums + place + split)"),
    (paged_prefill, "tl.where(seen, scores, HIDDEN)", "scores"),  # no mask
    (paged_prefill, "<= (position + asked)[:, None]\n", "< (position + asked)[:, None] + 2\n"),
    (paged_prefill, "> (position + asked)[:, None] - window)", ">= (position + asked)[:, None] - window)"),
    (paged_prefill, "length - count + start", "start"),  # no prefix
    (paged_prefill, "first += taken * programs - items", "first = items"),  # some items by nobody
    (mla_decode, "tl.where(known[None, :], scores * scale, HIDDEN)", "scores * scale"),  # no mask
    (mla_decode, "scores += tl.dot(rotated_q", "scores = tl.dot(rotated_q"),
]


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__)
def test_unchanged(module: ModuleType, device: torch.device) -> None:
    CHECKS[module](module, device)


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[new.split("\n")[0] for _, _, new in MUTATIONS])
def test_mutation_is_noticed(module: ModuleType, old: str, new: str, device: torch.device, tmp_path: Path) -> None:
    changed = mutated(module, old, new, tmp_path)
    with pytest.raises(AssertionError):
        CHECKS[module](changed, device)
