"""Ranks read their own parts of a checkpoint and no other bytes, and say what loading took."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from xllm_models.config import ModelConfig
from xllm_models.placement import Placement
from xllm_models.registry import build_model
from xllm_models.weights.host_memory import HostMemoryPeak
from xllm_models.weights.loader import load_weights
from xllm_models.weights.source import WeightSource, open_source
from xllm_platform.parallel import Group, ParallelState

from tests.support.tiny_model import make_tiny_model

MIB = 2**20


class Counting(WeightSource):
    """Another source, and the bytes of it that were handed out."""

    def __init__(self, source):
        self.source, self.path, self.tensors = source, source.path, source.tensors
        self.bytes: dict[str, int] = {}

    def stream(self, regions):
        for name, tensor in self.source.stream(regions):
            self.bytes[name] = tensor.numel() * tensor.element_size()
            yield name, tensor


def parallel(rank, size, ep=1):
    """Rank `rank` of `size` tensor-parallel ones, `ep` parts of the experts; never asked to communicate."""
    everyone = Group(tuple(range(size)), rank)
    width = size // ep  # ranks that share an expert's matrices
    own = [r for r in range(size) if r // width == rank // width]
    alike = [r for r in range(size) if r % width == rank % width]
    return ParallelState(world=everyone, tp=everyone, dp=Group((rank,), 0), ep=Group(tuple(alike), rank // width),
                         moe_tp=Group(tuple(own), rank % width))


def read_by_ranks(directory, size, ep=1):
    """For each rank {tensor: bytes read}."""
    counts = []
    for rank in range(size):
        source = Counting(open_source(directory))
        model = build_model(ModelConfig.from_path(directory), dtype=torch.float32, parallel=parallel(rank, size, ep))
        load_weights(model, source)
        counts.append(source.bytes)
    return counts


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("m"), "llama", num_key_value_heads=4, vocab=264)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_byte_of_a_cut_matrix_is_read_once(dense, size):
    whole, counts = open_source(dense), read_by_ranks(dense, size)
    for name, info in whole.tensors.items():
        total = 4 * torch.Size(info.shape).numel()
        replicated = "norm" in name
        assert [c[name] for c in counts] == [total if replicated else total // size] * size, name


def test_a_rank_reads_no_other_ranks_experts(tmp_path):
    directory = make_tiny_model(tmp_path / "m", "qwen3_moe", num_experts=4, num_experts_per_tok=2,
                                moe_intermediate_size=32, num_key_value_heads=2)
    counts = read_by_ranks(directory, 2, ep=2)
    experts = [{int(found[1]) for name in c if (found := re.search(r"experts\.(\d+)\.", name))} for c in counts]
    assert experts == [{0, 1}, {2, 3}]


def test_stacked_experts_are_cut_between_them(tmp_path):
    """Pages of the file that a rank touches are its own: of 8 experts, 2."""
    experts, rows, columns = 8, 2048, 1024
    stacked = torch.arange(experts, dtype=torch.float32).view(-1, 1, 1).expand(experts, rows, columns).contiguous()
    save_file({"experts.weight": stacked}, tmp_path / "model.safetensors")
    del stacked
    target = nn.Parameter(torch.empty(2, rows, columns))

    class Model:
        def placements(self):
            return {"experts.weight": Placement(target, (experts, rows, columns), (), 0, 1, 4)}

    seen = []
    load_weights(Model(), open_source(tmp_path), lambda done, total: seen.append(resident(tmp_path)))
    assert target[:, 0, 0].tolist() == [2.0, 3.0]
    own = 2 * rows * columns * 4
    assert own <= max(seen) <= own + 4 * MIB  # the system maps more at once


def resident(directory: Path) -> int:
    """Bytes of the directory's files that are mapped and in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith("model.safetensors") and str(directory) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_the_report_counts_time_and_memory(dense):
    model = build_model(ModelConfig.from_path(dense), dtype=torch.float32)
    report = load_weights(model, open_source(dense))
    assert report.bytes == sum(p.numel() * 4 for p in model.parameters())
    assert report.seconds > 0
    assert report.peak_bytes >= 0


def test_memory_that_came_and_went_counts():
    memory = HostMemoryPeak()
    ballast = mmap.mmap(-1, 64 * MIB)  # not an allocator's memory, of which some may be left from another test
    for page in range(0, len(ballast), mmap.PAGESIZE):
        ballast[page] = 1
    memory.sample()
    ballast.close()
    assert 60 * MIB < memory.rise() < 100 * MIB
    assert HostMemoryPeak().rise() < 8 * MIB
