"""The NPU platform's graphs with the attention that is told lengths by the host: replays that follow one another
without the host waiting, against torch's attention; and with a line of the code removed, which the device notices.
"""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from xllm_models.attention import npu_attention
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_models.forward_input import AttentionMetadata
from xllm_platform.npu import graph as npu_graph
from xllm_platform.registry import select

from tests.npu_lab.mutation import mutated
from xllm_npu.execution import input_builder
from xllm_npu.execution.step_message import StepInput

pytestmark = pytest.mark.npu_lab
HEADS, KV, DIM, BLOCK, BLOCKS, SIZE, LAYERS = 4, 2, 16, 16, 17, 4, 2
LAYER = [LayerAttention(i, DIM**-0.5, sliding_window=(0, 6)[i]) for i in range(LAYERS)]
STEPS = ((5, 17, 1, 40), (6, 18, 2, 41), (1, 1, 60, 3))  # keys of each row, the new one included


def filled(kind: type[TorchAttention], device: str) -> TorchAttention:
    """Caches with the same random content everywhere."""
    attention = kind(AttentionSpec(LAYERS, HEADS, KV, DIM, BLOCK, torch.float16, torch.device(device)))
    attention.allocate_kv_caches(BLOCKS)
    random = torch.Generator().manual_seed(7)
    for cache in (*attention.key_caches, *attention.value_caches):
        cache.copy_(torch.randn(cache.shape, generator=random).half())
    return attention


class Step:
    """Buffers of a decode step of SIZE rows; row i has blocks 4i + 1 to 4i + 4."""

    def __init__(self, device: str) -> None:
        self.query, self.key, self.value = (torch.zeros(SIZE, h, DIM, dtype=torch.float16, device=device)
                                            for h in (HEADS, KV, KV))
        self.lengths = torch.ones(SIZE, dtype=torch.int32, device=device)
        self.slots = torch.zeros(SIZE, dtype=torch.int32 if device == "npu" else torch.int64, device=device)
        self.table = torch.arange(1, 1 + 4 * SIZE, dtype=torch.int32).view(SIZE, 4).to(device)
        self.starts = torch.arange(SIZE + 1, dtype=torch.int32).to(device)

    def fill(self, number: int) -> AttentionMetadata:
        random = torch.Generator().manual_seed(number)
        for target in (self.query, self.key, self.value):
            target.copy_(torch.randn(target.shape, generator=random).half())
        lengths = np.array(STEPS[number], np.int32)
        self.lengths.copy_(torch.from_numpy(lengths))
        self.slots.copy_(torch.tensor([(4 * i + 1) * BLOCK + n - 1 for i, n in enumerate(lengths.tolist())],
                                      dtype=self.slots.dtype))
        return AttentionMetadata(SIZE, 0, self.starts, self.lengths, self.table, self.slots,
                                 np.arange(SIZE + 1, dtype=np.int32), lengths, int(lengths.max()))

    def attend(self, attention: TorchAttention) -> torch.Tensor:
        """All layers, one after the other: a layer's queries are the output of the one before."""
        out = attention.forward(LAYER[0], self.query, self.key, self.value)
        return attention.forward(LAYER[1], out.view(SIZE, HEADS, DIM) + self.query, self.key, self.value)


def expected() -> list[torch.Tensor]:
    attention, step, found = filled(TorchAttention, "cpu"), Step("cpu"), []
    for number in range(len(STEPS)):
        attention.prepare(step.fill(number))
        found.append(step.attend(attention))
    return found


def replayed(graphs: ModuleType, module: ModuleType) -> list[torch.Tensor]:
    """The steps by one graph, with nothing that makes the host wait in between."""
    torch.npu.set_device(0)
    backend = graphs.NpuCaptureBackend(torch.npu, torch_npu_alias())
    attention, step = filled(module.NpuAttention, "npu"), Step("npu")
    steps = [Step("npu") for _ in STEPS]
    metadata = [one.fill(number) for number, one in enumerate(steps)]
    attention.graph_tasks = backend.tasks
    attention.prepare(step.fill(0))
    graph = backend.capture(lambda: step.attend(attention))
    attention.graph_tasks = None
    found = []
    torch.npu.synchronize()
    for one, its in zip(steps, metadata):
        for name in ("query", "key", "value", "lengths", "slots"):
            getattr(step, name).copy_(getattr(one, name))
        attention.prepare(its)
        found.append(graph.replay().clone())
    return [one.cpu() for one in found]


def torch_npu_alias() -> Any:
    from torch_npu import _C

    return _C._weak_ref_tensor


def check(graphs: ModuleType, module: ModuleType) -> None:
    for found, wanted in zip(replayed(graphs, module), expected(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def test_replays_equal_the_reference(device: torch.device) -> None:
    check(npu_graph, npu_attention)


MUTATIONS = [
    (npu_graph, "                task.run(task.tensors)\n", ""),
    (npu_graph, "                task.updated.record(update)\n", ""),
    (npu_graph, "        update.wait_event(self._ended)  # the replay before this one\n", ""),
    (npu_graph, "        self._ended.record(runtime.current_stream())\n", ""),
    (npu_graph, "        updated.wait(stream)\n", ""),
    (npu_graph, "for task in self._tasks:", "for task in self._tasks[:1]:"),
    (npu_graph, "for task in self._tasks:", "for task in self._tasks[::-1][:1]:"),
    (npu_graph, "with runtime.stream(update):", "with runtime.stream(runtime.current_stream()):"),
    (npu_graph, "        runtime.graph_task_group_begin(stream)\n", ""),
    (npu_graph, "self._tasks.append(Task(run,", "self._tasks.append(Task(lambda tensors: None,"),
    (npu_attention, "if self.graph_tasks is not None:", "if False:"),
    (npu_attention, "self._key_lengths = metadata.seq_lens_host.tolist()",
     "self._key_lengths = getattr(self, '_key_lengths', None) or metadata.seq_lens_host.tolist()"),
    (npu_attention, "workspace=workspace, ", ""),
    (npu_attention, "out=[out, lse]", "out=[query, lse]"),
]


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[f"{old.strip()} > {new.strip()}"
                                                                     for _, old, new in MUTATIONS])
def test_what_is_removed_is_missed(
    device: torch.device, abandoned: None, module: ModuleType, old: str, new: str
) -> None:
    modules = {one: mutated(one, old, new) if one is module else one for one in (npu_graph, npu_attention)}
    with pytest.raises((RuntimeError, AssertionError, TypeError)):
        check(modules[npu_graph], modules[npu_attention])


def test_tasks_do_not_keep_the_graphs_memory(device: torch.device) -> None:
    """With one more layer nothing more is allocated: its tensors lie where those of the layer before lay."""
    reserved = []
    for layers in (2, 12):
        gc.collect()
        torch.npu.empty_cache()
        backend = select("npu").graph_backend()
        attention, step = filled(npu_attention.NpuAttention, "npu"), Step("npu")
        wide = torch.zeros(1 << 14, HEADS, DIM, dtype=torch.float16, device="npu")  # 2 MiB a layer
        attention.graph_tasks = backend.tasks

        def run(out: torch.Tensor = wide, layers: int = layers) -> torch.Tensor:
            for _ in range(layers):
                new = torch.empty_like(out)
                attention.graph_tasks.launch(lambda tensors: tensors[1].copy_(tensors[0]), (out, new))  # noqa: B023
                out = new
            return out

        attention.prepare(step.fill(0))
        before = torch.npu.memory_reserved()
        graph = backend.capture(run)
        reserved.append(torch.npu.memory_reserved() - before)
        del graph, backend
    assert reserved[1] == reserved[0]


def builder_steps(module: ModuleType) -> list[list[int]]:
    """Three steps built one after the other, none of them waited for; the token ids that the device got."""
    platform = select("npu")
    builder = module.InputBuilder(max_tokens=64, max_rows=8, max_blocks=4, block_size=BLOCK, device=platform.device(),
                                  pinned=True, new_event=platform.new_event)
    torch.npu.synchronize()
    found = []

    def i32(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    for number in range(1, 4):
        step = StepInput(step_id=number, num_decodes=2, rows=i32(0, 1), start=i32(number, 2 * number),
                         num_new=i32(1, 1), tokens=i32(10 * number, 11 * number), block_table=i32(1, 2), table_width=1,
                         sample_source=i32(0, 1), sample_rows=i32(0, 1), sample_output=i32(0, 0), admitted=[],
                         released=[])
        found.append(builder.build(step).input.token_ids.clone())
    return [one.tolist() for one in found]


def test_the_hosts_buffers_are_not_written_while_they_are_read(device: torch.device) -> None:
    assert builder_steps(input_builder) == [[10, 11], [20, 22], [30, 33]]


@pytest.mark.parametrize("line", ["self._sent[self._step % SIDES].synchronize()",
                                  "self._sent[self._step % SIDES].record()"])
def test_a_buffer_that_is_written_too_early_is_noticed(device: torch.device, line: str) -> None:
    with pytest.raises(RuntimeError, match="507000"):
        builder_steps(mutated(input_builder, line, "pass"))
