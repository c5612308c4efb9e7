"""Latent attention on the CPU against the reference one: odd sizes, dtypes, mixed batches, block copies."""

import pytest
import torch
from xllm_models.attention import cpu_mla
from xllm_models.attention.base import LayerAttention
from xllm_models.attention.mla_base import MlaSpec
from xllm_models.backends import UnknownBackendError, get_mla_attention, register_mla_attention

from tests.support.paged_model import BlockTables

# Of outputs whose standard deviation is about 1. bfloat16 rounds absorbed queries, scores and sums of latents.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-2, torch.float16: 2e-5}
NUM_BLOCKS = 96


class Pair:
    """Both backends, fed the same steps."""

    def __init__(self, heads=4, latent=32, rope=8, nope=16, value=16, block_size=16, dtype=torch.float32):
        spec = MlaSpec(2, heads, latent, rope, nope, value, block_size, dtype, torch.device("cpu"))
        self.ours, self.reference = get_mla_attention("numba")(spec), get_mla_attention("torch")(spec)
        for backend in (self.ours, self.reference):
            backend.allocate_kv_caches(NUM_BLOCKS)
        self.blocks = BlockTables(NUM_BLOCKS, block_size)
        self.compute = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        torch.manual_seed(0)
        self.up = (torch.randn(heads, nope + value, latent) / latent**0.5).to(self.compute)
        self.layers = [LayerAttention(i, (nope + rope) ** -0.5) for i in range(2)]
        self.tolerance = TOLERANCE[dtype]

    def step(self, rows):
        """rows of (sequence, new tokens); compares both layers' outputs and returns ours of layer 1."""
        metadata, _ = self.blocks.metadata(rows)
        spec, tokens = self.ours.spec, sum(n for _, n in rows)
        out = None
        for backend in (self.ours, self.reference):
            backend.prepare(metadata)
        for layer in self.layers:
            query = (2 * torch.randn(tokens, spec.num_heads, spec.rope_size + spec.nope_size)).to(self.compute)
            latent = torch.randn(tokens, spec.width).to(self.compute)
            out = self.ours.forward(layer, query, latent, self.up)
            expected = self.reference.forward(layer, query, latent, self.up)
            assert out.shape == expected.shape == (tokens, spec.num_heads * spec.value_size)
            assert out.dtype == expected.dtype
            torch.testing.assert_close(out, expected, rtol=self.tolerance, atol=self.tolerance)
        return out


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"threads{n}")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefill_chunks_and_decode(dtype, threads):
    pair = Pair(dtype=dtype)
    pair.step([(0, 33), (1, 17), (2, 2)])
    pair.step([(3, 1), (0, 1), (1, 31), (4, 16)])  # a fresh one-token prompt, a decode, a chunk on a prefix, a prompt
    for _ in range(3):
        pair.step([(sequence, 1) for sequence in range(5)])
    pair.step([(0, 1), (2, 60)])
    pair.step([(sequence, 1) for sequence in range(5)])


@pytest.mark.parametrize(("heads", "latent", "rope", "nope", "value", "block_size"), [
    (1, 1, 2, 1, 1, 1), (3, 5, 2, 3, 7, 4), (5, 17, 6, 4, 3, 7), (17, 16, 16, 16, 16, 32), (20, 48, 8, 24, 32, 64),
    (6, 33, 30, 9, 11, 24),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes(heads, latent, rope, nope, value, block_size, dtype, threads):
    pair = Pair(heads, latent, rope, nope, value, block_size, dtype)
    pair.step([(0, 19), (1, 5)])
    for _ in range(2):
        pair.step([(0, 1), (1, 1), (2, 1)])
    pair.step([(0, 1), (1, 3), (2, 30)])
    pair.step([(0, 1), (1, 1), (2, 1)])


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_of_prefill_in_slices(monkeypatch, expand, dtype):
    """Long enough for several slices of queries, keys beyond the exact ones, and heads in several parts."""
    way = cpu_mla.CpuMla._prefill_expanded if expand else cpu_mla.CpuMla._prefill_absorbed
    used = []

    def spy(self, *args):
        used.append(args[1].shape[0])
        return way(self, *args)

    monkeypatch.setattr(cpu_mla.CpuMla, "_prefill_expanded", spy)
    monkeypatch.setattr(cpu_mla.CpuMla, "_prefill_absorbed", spy)
    monkeypatch.setattr(cpu_mla, "_SCORES", 1 << 15)
    pair = Pair(dtype=dtype)
    pair.step([(0, 300), (1, 2)])
    pair.step([(1, 1), (0, 290)])
    pair.step([(0, 2)])
    assert used == [300, 2, 300, 2, 590, 590, 592, 592]


def test_the_cheaper_way_of_prefill_is_taken(monkeypatch):
    taken = []
    for name in ("_prefill_expanded", "_prefill_absorbed"):
        monkeypatch.setattr(cpu_mla.CpuMla, name, lambda *args, name=name: taken.append(name))
    spec = MlaSpec(1, 2, 512, 64, 128, 128, 16, torch.float32, torch.device("cpu"))
    backend = get_mla_attention("numba")(spec)
    backend.allocate_kv_caches(NUM_BLOCKS)
    blocks, up = BlockTables(NUM_BLOCKS, 16), torch.randn(2, 256, 512)
    for n in (600, 8, 500):  # a prompt, a few tokens on a long prefix, many tokens on it
        backend.prepare(blocks.metadata([(0, n)])[0])
        backend.forward(LayerAttention(0, 1.0), torch.randn(n, 2, 192), torch.randn(n, 576), up)
    assert taken == ["_prefill_expanded", "_prefill_absorbed", "_prefill_expanded"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 17])
def test_many_rows_are_absorbed_by_matrix_products(rows, dtype, threads):
    pair = Pair(dtype=dtype, latent=144, value=40)  # more than a strip of both
    pair.step([(sequence, 3) for sequence in range(rows)])
    pair.step([(sequence, 1) for sequence in range(rows)])


def test_a_long_row_is_shared_between_threads(threads):
    pair = Pair(heads=2)
    pair.step([(0, 700), (1, 3)])
    pair.step([(0, 1), (1, 1)])


def test_dummy_rows_do_no_harm():
    """A padded row has one token at position 0 in block 0."""
    pair = Pair()
    pair.blocks.tables[99] = [0]
    pair.step([(0, 20)])
    pair.step([(0, 1), (99, 1)])
    pair.step([(0, 1)])


def test_copied_blocks_read_like_their_sources():
    pair = Pair()
    pair.step([(0, 16)])
    source, target = pair.blocks.tables[0][0], pair.blocks._free.pop()
    for backend in (pair.ours, pair.reference):
        backend.copy_blocks(torch.tensor([[source, target]]))
    pair.blocks.tables[1], pair.blocks.lengths[1] = [target], 16
    pair.step([(0, 1), (1, 1)])
    cache = pair.ours.caches[0]
    assert torch.equal(cache[source], cache[target])
    assert cache[target].abs().sum() > 0


def test_bytes_per_block_count_one_latent_a_token():
    spec = MlaSpec(3, 4, 32, 8, 16, 24, 16, torch.bfloat16, torch.device("cpu"))
    for name in ("numba", "torch"):
        backend = get_mla_attention(name)(spec)
        assert backend.kv_bytes_per_block(spec) == 3 * 16 * (32 + 8) * 2
        backend.allocate_kv_caches(5)
        assert sum(cache.nbytes for cache in backend.caches) == 5 * backend.kv_bytes_per_block(spec)


def test_backends_are_found_by_name():
    assert get_mla_attention("npu") is get_mla_attention("cuda") is get_mla_attention("torch")
    assert get_mla_attention("numba") is cpu_mla.CpuMla
    with pytest.raises(UnknownBackendError, match="numba"):
        get_mla_attention("flash9")
    register_mla_attention("latent-toy", "xllm_models.attention.cpu_mla:CpuMla")
    assert get_mla_attention("latent-toy") is cpu_mla.CpuMla
