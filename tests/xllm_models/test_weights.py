"""The safetensors source and the loader, with a toy model of two layers."""

import json
import struct
import weakref
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from xllm_models.placement import Placement
from xllm_models.weights import safetensors_source
from xllm_models.weights.loader import load_weights
from xllm_models.weights.safetensors_source import INDEX_NAME, SafetensorsSource
from xllm_models.weights.source import WeightError, open_source

ROWS, COLUMNS = 8, 6


def checkpoint(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "a.q.weight": tensor(ROWS, COLUMNS),
        "a.k.weight": tensor(ROWS // 2, COLUMNS),
        "a.q.bias": tensor(ROWS),
        "a.o.weight": tensor(COLUMNS, ROWS),
        "norm.weight": tensor(COLUMNS),
    }


class Toy:
    """A fused [q; k] parameter, its bias, a row-parallel output and a norm that every rank has."""

    def __init__(self, rank=0, ranks=1, dtype=torch.float32, tied=True):
        self.rank, self.ranks, self.tied = rank, ranks, tied
        q, k = ROWS // ranks, ROWS // 2 // ranks
        self.qk = nn.Parameter(torch.zeros(q + k, COLUMNS, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(q, dtype=dtype))
        self.o = nn.Parameter(torch.zeros(COLUMNS, ROWS // ranks, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(COLUMNS, dtype=dtype))
        self.head = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype))
        self.finalized = 0

    def placements(self):
        def split(dim):
            return {"shard_dim": dim, "shard_index": self.rank, "shard_count": self.ranks}

        q = ROWS // self.ranks
        return {
            "a.q.weight": Placement(self.qk, (ROWS, COLUMNS), (slice(0, q),), **split(0)),
            "a.k.weight": Placement(self.qk, (ROWS // 2, COLUMNS), (slice(q, None),), **split(0)),
            "a.q.bias": Placement(self.bias, (ROWS,), **split(0)),
            "a.o.weight": Placement(self.o, (COLUMNS, ROWS), **split(1)),
            "norm.weight": Placement(self.norm, (COLUMNS,)),
            "lm_head.weight": Placement(self.head, (ROWS, COLUMNS), optional=self.tied),
        }

    def finalize_weights(self):
        self.finalized += 1


def save_sharded(directory, tensors, index=True):
    names = list(tensors)
    parts = [names[:2], names[2:4], names[4:]]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def assert_is(model, tensors):
    q = ROWS // model.ranks
    k = ROWS // 2 // model.ranks
    rank = model.rank
    expected = torch.cat(
        [tensors["a.q.weight"][rank * q : (rank + 1) * q], tensors["a.k.weight"][rank * k : (rank + 1) * k]]
    )
    assert torch.equal(model.qk, expected.to(model.qk.dtype))
    assert torch.equal(model.bias, tensors["a.q.bias"][rank * q : (rank + 1) * q].to(model.qk.dtype))
    assert torch.equal(model.o, tensors["a.o.weight"][:, rank * q : (rank + 1) * q].to(model.qk.dtype))
    assert torch.equal(model.norm, tensors["norm.weight"].to(model.qk.dtype))


@pytest.mark.parametrize("layout", ["single", "indexed", "unindexed"])
def test_loads_every_layout(tmp_path, layout):
    tensors = checkpoint()
    if layout == "single":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        save_sharded(tmp_path, tensors, index=layout == "indexed")
    model, heard = Toy(), []
    report = load_weights(model, open_source(tmp_path), lambda done, total: heard.append((done, total)))
    assert_is(model, tensors)
    total = sum(t.nbytes for t in tensors.values())
    assert (report.bytes, report.tensors, model.finalized) == (total, len(tensors), 1)
    assert heard[-1] == (total, total)
    assert heard == sorted(heard)
    assert len(heard) == len(tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_slices_and_reads_no_more(tmp_path, rank, monkeypatch):
    tensors = checkpoint()
    save_sharded(tmp_path, tensors)
    read = []
    inner = SafetensorsSource._read

    def counting(self, shard, name, region):
        tensor = inner(self, shard, name, region)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(SafetensorsSource, "_read", counting)
    model = Toy(rank=rank, ranks=2)
    load_weights(model, SafetensorsSource(tmp_path))
    assert_is(model, tensors)
    norm = tensors["norm.weight"].nbytes
    assert sum(read) == (sum(t.nbytes for t in tensors.values()) - norm) // 2 + norm


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_to_the_parameters_dtype(tmp_path, stored, to):
    tensors = checkpoint(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Toy(dtype=to)
    load_weights(model, SafetensorsSource(tmp_path))
    assert_is(model, tensors)


def test_one_shard_is_open_at_a_time_and_each_once(tmp_path, monkeypatch):
    save_sharded(tmp_path, checkpoint())
    opened, now = [], 0
    inner = safetensors_source.safe_open

    @contextmanager
    def counting(file, **options):
        nonlocal now
        now += 1
        assert now == 1, "two shards open"
        opened.append(file.name)
        with inner(file, **options) as shard:
            yield shard
        now -= 1

    monkeypatch.setattr(safetensors_source, "safe_open", counting)
    load_weights(Toy(), SafetensorsSource(tmp_path))
    assert len(opened) == len(set(opened)) == 3


def test_a_tensor_is_dropped_before_the_next_is_read(tmp_path):
    """One that lived on would keep its shard's mapping alive while the next shard opens."""
    save_sharded(tmp_path, checkpoint())

    class Watching(SafetensorsSource):
        alive = weakref.WeakSet()

        def _read(self, shard, name, region):
            assert not self.alive, f"{name} is read while another is held"
            tensor = super()._read(shard, name, region)
            self.alive.add(tensor)
            return tensor

    assert load_weights(Toy(), Watching(tmp_path)).tensors == 5


def test_tied_and_untied_heads(tmp_path):
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(Toy(tied=True), SafetensorsSource(tmp_path))
    with pytest.raises(WeightError, match=r"lacks 1 of the model's tensors: lm_head\.weight"):
        load_weights(Toy(tied=False), SafetensorsSource(tmp_path))
    head = torch.ones(ROWS, COLUMNS)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    model = Toy(tied=True)
    load_weights(model, SafetensorsSource(tmp_path))
    assert torch.equal(model.head, head)


def test_missing_tensors_are_named_with_their_number_and_nothing_is_loaded(tmp_path):
    tensors = {f"model.{name}": t for name, t in checkpoint().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Toy()
    with pytest.raises(WeightError) as error:
        load_weights(model, SafetensorsSource(tmp_path))
    for part in ("lacks 5", "a.q.weight", "norm.weight", str(tmp_path), "such as model.a"):
        assert part in str(error.value)
    assert not model.qk.any()
    assert not model.finalized


def test_mis_shaped_tensors_are_named_with_both_shapes(tmp_path):
    tensors = checkpoint() | {"a.o.weight": torch.zeros(COLUMNS, ROWS + 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"a\.o\.weight is \[6, 9\], expected \[6, 8\]"):
        load_weights(Toy(), SafetensorsSource(tmp_path))


def test_unexpected_tensors_are_ignored_and_logged_but_for_known_buffers(tmp_path, caplog):
    extra = {"vision.weight": torch.zeros(2), "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(checkpoint() | extra, tmp_path / "model.safetensors")
    with caplog.at_level("DEBUG", logger="xllm_models"):
        report = load_weights(Toy(), SafetensorsSource(tmp_path))
    assert report.tensors == 5
    assert "vision.weight" in caplog.text
    assert "inv_freq" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_unsupported_dtypes_are_refused_by_name(tmp_path, dtype):
    save_file(
        checkpoint() | {"norm.weight": torch.zeros(COLUMNS, dtype=dtype)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(WeightError, match=r"norm\.weight in .*model\.safetensors has dtype"):
        load_weights(Toy(), SafetensorsSource(tmp_path))


class Fused:
    """One checkpoint matrix of three below each other, and bytes that only the model can read."""

    def __init__(self, rank=0, ranks=1, store=True):
        self.rows = nn.Parameter(torch.zeros((ROWS + 2 * (ROWS // 2)) // ranks, COLUMNS))
        self.bytes, self.rank, self.ranks, self.keep = None, rank, ranks, store
        self.sections = tuple((size, rank, ranks) for size in (ROWS, ROWS // 2, ROWS // 2))

    def store(self, tensor):
        self.bytes = tensor.clone()

    def placements(self):
        store = self.store if self.keep else None
        return {
            "qkv.weight": Placement(self.rows, (2 * ROWS, COLUMNS), shard_dim=0, sections=self.sections),
            "blocks": Placement(self.rows, (4, 2), (), 0, self.rank, self.ranks, store=store),
        }


def fused_checkpoint(directory):
    tensors = {"qkv.weight": torch.randn(2 * ROWS, COLUMNS), "blocks": torch.arange(8, dtype=torch.uint8).view(4, 2)}
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_rank_reads_its_part_of_each_matrix_of_a_fused_tensor(tmp_path, rank, ranks):
    tensors, model = fused_checkpoint(tmp_path), Fused(rank, ranks)
    report = load_weights(model, SafetensorsSource(tmp_path))
    matrices = tensors["qkv.weight"].split([size for size, _, _ in model.sections])
    assert torch.equal(model.rows, torch.cat([matrix.chunk(ranks)[rank] for matrix in matrices]))
    assert torch.equal(model.bytes, tensors["blocks"].chunk(ranks)[rank])
    assert report.bytes == (2 * ROWS * COLUMNS + 8) * 4 // ranks


def test_bytes_are_refused_where_the_model_has_no_use_for_them(tmp_path):
    fused_checkpoint(tmp_path)
    model = Fused(store=False)
    with pytest.raises(WeightError, match=r"blocks in .*U8.*unquantized"):
        load_weights(model, SafetensorsSource(tmp_path))
    assert model.rows.abs().sum() == 0


def test_ranks_that_do_not_divide_are_refused(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    model = Toy()
    model.ranks = 3
    with pytest.raises(WeightError, match=r"a\.q\.weight has 8 .* 3 ranks"):
        load_weights(model, SafetensorsSource(tmp_path))


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_truncated_files_are_named(tmp_path, keep):
    save_sharded(tmp_path, checkpoint())
    file = tmp_path / "model-00002-of-00003.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(WeightError) as error:
        SafetensorsSource(tmp_path)
    assert f"{file} is truncated" in str(error.value)
    assert f"{len(content[:keep]):,} bytes" in str(error.value)
    if keep == -1:
        assert f"{len(content):,}" in str(error.value)
        assert "a.o.weight" in str(error.value) or "a.q.bias" in str(error.value)


def test_damaged_headers_are_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 8) + b'{"a": 1}')
    with pytest.raises(WeightError, match=f"{file} .*header is damaged"):
        SafetensorsSource(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(WeightError, match="git lfs pull"):
        SafetensorsSource(tmp_path)


def test_index_errors_say_what_is_wrong(tmp_path):
    save_sharded(tmp_path, checkpoint())
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match=r"lacks model-00003-of-00003\.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(WeightError, match="outside its directory"):
        SafetensorsSource(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(WeightError, match=r"index\.json is damaged"):
        SafetensorsSource(tmp_path)


def test_the_same_tensor_twice_is_refused_but_consolidated_copies_are_skipped(tmp_path):
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert "other" not in SafetensorsSource(tmp_path).tensors
    save_file({"norm.weight": torch.zeros(1)}, tmp_path / "old.safetensors")
    with pytest.raises(
        WeightError, match=r"norm\.weight is both in model\.safetensors and in old\.safetensors"
    ):
        SafetensorsSource(tmp_path)


def test_pickles_are_refused_with_the_reason_and_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(WeightError) as error:
        SafetensorsSource(tmp_path)
    for part in ("pytorch_model.bin", "execute any code", "save_pretrained"):
        assert part in str(error.value)
    save_file(checkpoint(), tmp_path / "model.safetensors")
    SafetensorsSource(tmp_path)  # beside safetensors they are just not looked at


def test_an_empty_directory_says_so(tmp_path):
    with pytest.raises(WeightError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path)
