"""The paged attention kernels on the emulated device against plain torch in float32."""

from __future__ import annotations

import pytest
import torch
from triton_lab.compile import CompileError
from triton_lab.figures import compile_case
from xllm_kernels_npu import paged_decode as decode_module
from xllm_kernels_npu import paged_prefill as prefill_module
from xllm_kernels_npu.kernel import CompileCase
from xllm_kernels_npu.kv_store import kv_store, kv_store_reference, latent_store
from xllm_kernels_npu.mla_decode import KERNELS as MLA_KERNELS
from xllm_kernels_npu.mla_decode import mla_decode, mla_decode_reference
from xllm_kernels_npu.paged_decode import paged_attention_reference, paged_decode
from xllm_kernels_npu.paged_prefill import paged_prefill

from tests.npu_lab.kernels.numbers import FEW_DTYPES, random, same
from tests.npu_lab.kernels.pages import Pages, queries

pytestmark = pytest.mark.npu_lab
LENGTHS = [1, 2, 127, 128, 129, 300, 1000]
SHAPES = [  # query heads, key/value heads, head size
    (4, 2, 16), (9, 3, 64), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((6, 1, 80), (16, 16, 128)))]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def ones_to(lengths: list[int]) -> torch.Tensor:
    return torch.arange(len(lengths) + 1, dtype=torch.int32)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("token", [(1, 16), (3, 64), (5, 100), (16, 272)])
def test_kv_store(device: torch.device, dtype: torch.dtype, token: tuple[int, int]) -> None:
    wide = random((70, token[0] + 1, token[1]), dtype, device)
    key, value = wide[:, :-1], random((70, *token), dtype, device)
    slots = torch.randperm(19 * 16)[:70] + 16
    slots[-3:] = torch.tensor([0, 3, 0])  # padding goes to the dummy block
    caches = [random((20, 16, *token), dtype, device) for _ in "kv"]
    expected = [cache.cpu() for cache in caches]
    kv_store(key, value, *caches, slots.to(device))
    for new, cache, wanted in zip((key, value), caches, expected):
        kv_store_reference(new.cpu(), wanted, slots)
        assert torch.equal(cache.cpu()[1:], wanted[1:])
        assert torch.equal(cache.cpu()[0, 3], new.cpu()[-2])


def test_latent_store(device: torch.device) -> None:
    latent, slots = random((5, 40), torch.bfloat16, device), torch.tensor([31, 16, 40, 17, 63])
    cache = torch.zeros(4, 16, 40, dtype=torch.bfloat16, device=device)
    expected = cache.cpu()
    latent_store(latent, cache, slots.to(device))
    kv_store_reference(latent.cpu(), expected, slots)
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(device: torch.device, dtype: torch.dtype, splits: int, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, size = shape
    pages = Pages.filled(LENGTHS, 128, (kv_heads, size), dtype, device)
    query, _ = queries([1] * len(LENGTHS), heads, size, dtype, device)
    result = paged_decode(query, pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens, size**-0.5,
                          splits=splits)
    same(result, paged_attention_reference(query.cpu(), *pages.on_host(), ones_to(LENGTHS), size**-0.5))


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("block_size", [pytest.param(16, marks=pytest.mark.slow), 48, 128])
@pytest.mark.parametrize("extra", [{}, {"window": 100}, {"window": 1}, {"softcap": 2.0}, {"sinks": True},
                                   {"window": 130, "softcap": 3.0, "sinks": True}])
@pytest.mark.slow
def test_decode_with_extras(device: torch.device, splits: int, block_size: int, extra: dict[str, object]) -> None:
    pages = Pages.filled(LENGTHS, block_size, (2, 32), torch.float32, device)
    query, _ = queries([1] * len(LENGTHS), 6, 32, torch.float32, device)
    given = {**extra, "sinks": random((6,), torch.float32, device)} if extra.get("sinks") else extra
    result = paged_decode(query, pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens, 0.3,
                          splits=splits, **given)
    on_host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    same(result, paged_attention_reference(query.cpu(), *pages.on_host(), ones_to(LENGTHS), 0.3, **on_host))


def test_a_row_without_keys_is_zero(device: torch.device) -> None:
    pages = Pages.filled([0, 5], 16, (2, 16), torch.float32, device)
    query, _ = queries([1, 1], 4, 16, torch.float32, device)
    for splits in (1, 4):
        result = paged_decode(query, pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens, 0.25,
                              splits=splits)
        assert not result[0].any()
        assert result[1].isfinite().all()


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Whole prompts, chunks after a cached prefix, single tokens; odd lengths."""
    heads, kv_heads, size = shape
    counts, lengths = [1, 63, 65, 200, 1, 7, 130], [1, 63, 65, 200, 300, 390, 130 + 256]
    pages = Pages.filled(lengths, 128, (kv_heads, size), dtype, device)
    query, start = queries(counts, heads, size, dtype, device)
    result = paged_prefill(query, pages.key_cache, pages.value_cache, pages.block_table, start, pages.seq_lens,
                           size**-0.5)
    same(result, paged_attention_reference(query.cpu(), *pages.on_host(), start.cpu(), size**-0.5))


@pytest.mark.parametrize("block_size", [pytest.param(16, marks=pytest.mark.slow), 48, 128])
@pytest.mark.parametrize("extra", [{"window": 100}, {"window": 1}, {"softcap": 2.0}, {"sinks": True},
                                   {"window": 24, "softcap": 3.0, "sinks": True}])
@pytest.mark.slow
def test_prefill_with_extras(device: torch.device, block_size: int, extra: dict[str, object]) -> None:
    counts, lengths = [3, 150, 70], [3, 150, 500]
    pages = Pages.filled(lengths, block_size, (2, 32), torch.float32, device)
    query, start = queries(counts, 6, 32, torch.float32, device)
    given = {**extra, "sinks": random((6,), torch.float32, device)} if extra.get("sinks") else extra
    result = paged_prefill(query, pages.key_cache, pages.value_cache, pages.block_table, start, pages.seq_lens, 0.3,
                           **given)
    on_host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    same(result, paged_attention_reference(query.cpu(), *pages.on_host(), start.cpu(), 0.3, **on_host))


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("heads", "latent", "rotated"), [
    (4, 24, 8), pytest.param(20, 512, 64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("splits", [1, 4])
def test_mla_decode(
    device: torch.device, dtype: torch.dtype, heads: int, latent: int, rotated: int, splits: int
) -> None:
    pages = Pages.filled(LENGTHS, 64, (latent + rotated,), dtype, device)
    query = random((len(LENGTHS), heads, latent + rotated), dtype, device)
    parts = query.split((latent, rotated), -1)
    scale = (latent + rotated) ** -0.5
    result = mla_decode(*parts, pages.key_cache, pages.block_table, pages.seq_lens, scale, splits=splits)
    cache, _, table, lengths = pages.on_host()
    same(result, mla_decode_reference(*(part.cpu() for part in parts), cache, table, lengths, scale))


def test_long_context(device: torch.device) -> None:
    lengths = [20000]
    pages = Pages.filled(lengths, 128, (1, 64), torch.bfloat16, device)
    query, start = queries([5], 4, 64, torch.bfloat16, device)
    arguments = (pages.key_cache, pages.value_cache, pages.block_table)
    expected = paged_attention_reference(query.cpu(), *pages.on_host(), start.cpu(), 0.125)
    same(paged_prefill(query, *arguments, start, pages.seq_lens, 0.125), expected)
    same(paged_decode(query[-1:], *arguments, pages.seq_lens, 0.125), expected[-1:])


def test_lengths_are_read_at_replay(device: torch.device) -> None:
    """No update of the graph: the same nodes, other lengths, tables and slots."""
    pages = Pages.filled([40, 7, 90], 16, (2, 16), torch.float32, device)
    query, _ = queries([1, 1, 1], 4, 16, torch.float32, device)
    lengths = pages.seq_lens.clone()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = paged_decode(query, pages.key_cache, pages.value_cache, pages.block_table, lengths, 0.25, splits=2)
    for changed in ([40, 7, 90], [1, 3, 33]):
        lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        keys, values, table, _ = pages.on_host()
        same(out, paged_attention_reference(query.cpu(), keys, values, table, torch.tensor(changed),
                                            ones_to(changed), 0.25))


def test_blocks_that_no_tile_fits_are_refused(device: torch.device) -> None:
    pages = Pages.filled([5], 8, (1, 16), torch.float32, device)
    query, _ = queries([1], 1, 16, torch.float32, device)
    with pytest.raises(ValueError, match="block_size has to be a multiple of 16"):
        paged_decode(query, pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens, 1.0)


@pytest.mark.parametrize("kernels", [decode_module.KERNELS, prefill_module.KERNELS, MLA_KERNELS])
def test_tiles_past_on_chip_memory_are_refused(kernels: tuple) -> None:
    kernel = kernels[0]
    case: CompileCase = kernel.cases[0]
    wide = {name: case.constants[name] * 32 for name in ("TILE", "BLOCK_SIZE")}
    with pytest.raises(CompileError, match=r"overflow|above its budget"):
        compile_case("some", kernel, CompileCase("wide", case.signature, {**case.constants, **wide}), "Ascend910B3")
