"""The CPU attention against the reference one: odd sizes, windows, dtypes, mixed batches, block copies."""

import pytest
import torch
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.backends import UnknownBackendError, get_attention, get_ops, register_attention

from tests.support.paged_model import BlockTables

# float16 is the cache's, both round alike. In bfloat16 prefill scores are rounded too: 2**-9 of a score of 16 is 3 %.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 3e-6}
NUM_BLOCKS = 96


class Pair:
    """Both backends, fed the same steps."""

    def __init__(self, heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, window=0,
                 softcap=0.0, sinks=False):
        spec = AttentionSpec(2, heads, kv_heads, head_dim, block_size, dtype, torch.device("cpu"))
        self.ours, self.reference = get_attention("numba")(spec), get_attention("torch")(spec)
        for backend in (self.ours, self.reference):
            backend.allocate_kv_caches(NUM_BLOCKS)
        self.blocks = BlockTables(NUM_BLOCKS, block_size)
        self.compute = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.tolerance = TOLERANCE[dtype]
        torch.manual_seed(0)
        self.layers = [LayerAttention(i, head_dim**-0.5, window, softcap, 2 * torch.randn(heads) if sinks else None)
                       for i in range(2)]

    def step(self, rows):
        """rows of (sequence, new tokens); compares both layers' outputs and returns ours of layer 1."""
        metadata, _ = self.blocks.metadata(rows)
        spec, tokens = self.ours.spec, sum(n for _, n in rows)
        out = None
        for backend in (self.ours, self.reference):
            backend.prepare(metadata)
        for layer in self.layers:
            qkv = (2 * torch.randn(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)).to(self.compute)
            parts = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            out = self.ours.forward(layer, *parts)
            expected = self.reference.forward(layer, *parts)
            assert out.shape == expected.shape
            assert out.dtype == expected.dtype
            torch.testing.assert_close(out, expected, rtol=self.tolerance, atol=2 * self.tolerance)
        return out


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"threads{n}")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 1, 7, 40])
def test_prefill_chunks_and_decode(dtype, window, threads):
    pair = Pair(dtype=dtype, window=window)
    pair.step([(0, 33), (1, 17), (2, 2)])
    pair.step([(3, 1), (0, 1), (1, 31), (4, 16)])  # a fresh one-token prompt, a decode, a chunk on a prefix, a prompt
    pair.step([(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)])
    pair.step([(4, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("softcap", "sinks"), [(3.0, False), (0.0, True), (5.0, True)])
def test_soft_caps_and_sinks(dtype, window, softcap, sinks, threads):
    pair = Pair(heads=6, dtype=dtype, window=window, softcap=softcap, sinks=sinks)
    pair.step([(0, 33), (1, 17), (2, 2)])
    pair.step([(3, 1), (0, 1), (1, 31), (4, 200)])
    pair.step([(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)])


def test_soft_caps_and_sinks_change_what_they_should():
    plain, capped, sunk = Pair(), Pair(softcap=0.5), Pair(sinks=True)
    outs = []
    for pair in (plain, capped, sunk):
        torch.manual_seed(1)
        outs.append(pair.step([(0, 20)]))
    assert (outs[0] - outs[1]).abs().max() > 0.1
    assert (outs[0] - outs[2]).abs().max() > 0.1


@pytest.mark.parametrize("groups", range(1, 10))
def test_every_group_size(groups):
    pair = Pair(heads=3 * groups, kv_heads=3, head_dim=24, block_size=8)
    pair.step([(0, 41), (1, 8)])
    pair.step([(0, 1), (1, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_block_and_head_sizes(block_size, head_dim, dtype):
    pair = Pair(head_dim=head_dim, block_size=block_size, dtype=dtype)
    pair.step([(0, 19), (1, 3)])
    pair.step([(0, 1), (1, 9)])
    pair.step([(0, 1), (1, 1)])


@pytest.mark.parametrize("window", [0, 300])
def test_long_context_is_cut_between_threads(window, threads):
    pair = Pair(heads=3, kv_heads=1, head_dim=64, window=window)
    pair.step([(0, 1200)])
    pair.step([(0, 1), (1, 1)])
    pair.step([(0, 1), (1, 1)])
    pair.step([(0, 130), (1, 3)])


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
    key = pair.ours.key_caches[0]
    assert torch.equal(key[source], key[target])
    assert key[target].abs().sum() > 0


def test_bytes_per_block():
    spec = AttentionSpec(3, 4, 2, 16, 8, torch.bfloat16, torch.device("cpu"))
    for name in ("numba", "torch"):
        assert get_attention(name).kv_bytes_per_block(spec) == 2 * 3 * 8 * 2 * 16 * 2


def test_backends_are_found_by_name():
    register_attention("toy", "xllm_models.attention.torch_attention:TorchAttention")
    assert get_attention("toy") is get_attention("torch")
    with pytest.raises(UnknownBackendError, match="numba"):
        get_attention("flash9")
    with pytest.raises(UnknownBackendError, match="cpu"):
        get_ops("tpu")


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_device_backends_import_without_their_device(name):
    assert get_attention(name).kv_bytes_per_block
    assert get_ops(name).rms_norm
