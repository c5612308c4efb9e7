"""NPUGraph: capture, replay, refusals, task groups that are updated, and what is left when a graph goes."""

from __future__ import annotations

import gc

import pytest
import torch
import torch_npu
from npu_emulator import fake_cann
from npu_emulator.operators.attention import attention

pytestmark = pytest.mark.npu_lab
ROWS, HEADS, KV_HEADS, DIM, BLOCK = 2, 4, 2, 16, 16
LENGTHS = ([5, 9], [33, 48])


def test_capture_runs_nothing_and_replay_reads_the_buffers(device: torch.device) -> None:
    weight, x, cache = torch.randn(8, 8).to(device), torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        h = x @ weight
        cache.copy_(h)
        cache.add_(1)
        y = torch.nn.functional.silu(h)
    assert cache.abs().sum() == 0
    for _ in range(2):
        new = torch.randn(4, 8)
        x.copy_(new)
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.nn.functional.silu(new @ weight.cpu()))
        torch.testing.assert_close(cache.cpu(), new @ weight.cpu() + 1)


def test_a_replay_copies_nothing_to_the_host(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
    before = fake_cann.counters()
    graph.replay()
    found = fake_cann.counters().since(before)
    assert (found["d2h_calls"], found["graph_launches"]) == (0, 1)
    assert y.tolist() == [0.0] * 4


@pytest.mark.parametrize("wait", [lambda x: torch.npu.current_stream().synchronize(), lambda x: x.sum().item()],
                         ids=["synchronize", "item"])
def test_waiting_for_the_device_spoils_a_capture(device: torch.device, wait) -> None:
    x = torch.zeros(4, device=device)
    graph = torch.npu.NPUGraph()

    def capture() -> None:
        with torch.npu.graph(graph):
            wait(x + 1)

    with pytest.raises(RuntimeError):
        capture()


def test_an_error_in_a_replay_is_raised(device: torch.device) -> None:
    index = torch.zeros(2, dtype=torch.int64, device=device)
    table = torch.arange(4.0).to(device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        table.index_select(0, index)
    index.fill_(9)
    with pytest.raises(IndexError):
        graph.replay()


def test_a_graph_that_goes_leaves_no_node(device: torch.device) -> None:
    gc.collect()
    before, graphs = fake_cann.num_nodes(), fake_cann.counters().graphs_live
    graph = torch.npu.NPUGraph()
    x = torch.zeros(4, device=device)
    with torch.npu.graph(graph):
        y = x + 1
    assert fake_cann.num_nodes() > before
    del graph, y
    gc.collect()
    assert (fake_cann.num_nodes(), fake_cann.counters().graphs_live) == (before, graphs)


class Paged:
    """Decode attention of two rows over a paged cache."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.keys, self.values = (torch.randn(16, BLOCK, KV_HEADS * DIM).half().to(device) for _ in range(2))
        self.query = torch.zeros(ROWS, 1, HEADS * DIM, dtype=torch.float16, device=device)
        self.table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32).to(device)
        self.options = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": DIM**-0.5,
                        "input_layout": "BSH", "block_size": BLOCK}

    def new_query(self) -> None:
        self.query.copy_(torch.randn(self.query.shape))

    def expected(self, lengths: list[int]) -> torch.Tensor:
        host = [t.cpu() for t in (self.query, self.keys, self.values)]
        return attention(*host, actual_seq_lengths_kv=lengths, block_table=self.table.cpu(), **self.options)[0]


def test_lengths_are_updated_between_replays(device: torch.device) -> None:
    paged = Paged(device)
    options = {**paged.options, "block_table": paged.table}
    inputs = (paged.query, paged.keys, paged.values)
    out, lse = torch.empty_like(paged.query), torch.empty(1, device=device)
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
        *inputs, actual_seq_lengths_kv=[1, 1], **options)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event = torch.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch_npu.npu_fused_infer_attention_score.out(
            *inputs, actual_seq_lengths_kv=[1, 1], workspace=workspace, out=[out, lse], **options)
        handle = torch.npu.graph_task_group_end(stream)
        doubled = out * 2
    update = torch.npu.Stream()
    for lengths in LENGTHS:
        paged.new_query()
        with torch.npu.stream(update):
            torch.npu.graph_task_update_begin(update, handle)
            torch_npu.npu_fused_infer_attention_score.out(
                *inputs, actual_seq_lengths_kv=lengths, workspace=workspace, out=[out, lse], **options)
            torch.npu.graph_task_update_end(update)
            event.record(update)
        graph.replay()
        assert torch.equal(doubled.cpu(), paged.expected(lengths) * 2), lengths


def test_torch_npu_updates_lengths_itself(device: torch.device) -> None:
    paged = Paged(device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = torch_npu.npu_fused_infer_attention_score(
            paged.query, paged.keys, paged.values, actual_seq_lengths_kv=[1, 1], block_table=paged.table,
            **paged.options)
        doubled = out * 2
    for lengths in LENGTHS:
        paged.new_query()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        assert torch.equal(doubled.cpu(), paged.expected(lengths) * 2), lengths


def test_without_an_update_a_replay_never_ends(device: torch.device, abandoned: None) -> None:
    paged = Paged(device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = torch_npu.npu_fused_infer_attention_score(
            paged.query, paged.keys, paged.values, actual_seq_lengths_kv=[5, 9], block_table=paged.table,
            **paged.options)
    paged.new_query()
    graph.replay()
    with pytest.raises(RuntimeError, match="507046"):
        out.cpu()


class TwoStreams:
    """A value that one stream writes and a graph waits for, in a graph and beside it."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.ones(4, device=device)
        self.side = torch.npu.Stream()
        self.written = torch.npu.ExternalEvent()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            self.written.wait(torch.npu.current_stream())
            self.y = self.x * 2


def test_a_replay_goes_on_when_its_event_comes(device: torch.device) -> None:
    pair = TwoStreams(device)
    pair.graph.replay()
    with torch.npu.stream(pair.side):
        pair.x.fill_(5)
        pair.written.record(pair.side)
    assert pair.y.tolist() == [10.0] * 4


def test_an_event_recorded_before_the_graph_that_resets_it_has_ended(device: torch.device, abandoned: None) -> None:
    pair = TwoStreams(device)
    pair.graph.replay()
    pair.written.record(pair.side)
    with pytest.raises(RuntimeError, match="may not have ended"):
        pair.written.record(pair.side)
    ended = torch.npu.Event()
    ended.record()
    pair.side.wait_event(ended)
    pair.written.record(pair.side)


def test_pinned_memory_that_is_written_too_early(device: torch.device) -> None:
    host, target = torch.zeros(64).pin_memory(), torch.zeros(64, device=device)
    target.copy_(host, non_blocking=True)
    torch.npu.synchronize()
    host.fill_(1)  # after the copy
    target.copy_(host, non_blocking=True)
    host.fill_(2)
    with pytest.raises(RuntimeError, match="may not have run"):
        torch.npu.synchronize()


def test_streams_end(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, device=device)
    torch.npu.synchronize()
    monkeypatch.setenv("FAKECANN_STREAMS", "0")
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="207008"), torch.npu.graph(graph):
        x + 1
