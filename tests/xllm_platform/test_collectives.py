"""Collectives between two real processes over gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess


def worker(rank: int, rendezvous: str, answers) -> None:
    """Run every collective once and report the results; values differ by rank and position."""
    import torch
    from xllm_platform import collectives
    from xllm_platform.parallel import ParallelInit, ParallelState

    torch.set_num_threads(1)
    init = ParallelInit(
        rank=rank, world_size=2, init_method=rendezvous, tp_size=2, ep_size=2, timeout_seconds=60
    )
    state = ParallelState.initialize(init, "gloo")
    tp = state.tp
    found: dict[str, object] = {"ranks": (tp.rank, tp.size, state.dp.size, state.ep.size, state.moe_tp.size)}
    x = torch.arange(4.0).reshape(2, 2) + 10 * rank  # rank 0: 0..3, rank 1: 10..13
    for op in ("sum", "avg", "max", "min"):
        found[op] = collectives.all_reduce(x.clone(), tp, op).tolist()
    found["bfloat16"] = collectives.all_reduce(x.bfloat16(), tp).tolist()
    for dim in (0, 1):
        found[f"gather {dim}"] = collectives.all_gather(x, tp, dim).tolist()
        found[f"scatter {dim}"] = collectives.reduce_scatter(x, tp, dim).tolist()
    found["gather transposed"] = collectives.all_gather(x.t(), tp).tolist()
    found["to all"] = collectives.all_to_all(x, tp).tolist()
    # Rank 0 sends three rows to rank 1 and one to itself; rank 1 sends two rows to each.
    rows = torch.arange(4) + 10 * rank
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    found["uneven"] = collectives.all_to_all(rows, tp, sent, received).tolist()
    found["broadcast"] = collectives.broadcast(torch.tensor([rank]), tp, source=1).tolist()
    collectives.barrier(tp)
    state.shutdown()
    state.shutdown()
    answers.put((rank, found))


def test_two_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    processes = [context.Process(target=worker, args=(rank, rendezvous, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    expected_by_both = {
        "sum": [[10, 12], [14, 16]],
        "avg": [[5, 6], [7, 8]],
        "max": [[10, 11], [12, 13]],
        "min": [[0, 1], [2, 3]],
        "bfloat16": [[10, 12], [14, 16]],
        "gather 0": [[0, 1], [2, 3], [10, 11], [12, 13]],
        "gather 1": [[0, 1, 10, 11], [2, 3, 12, 13]],
        "gather transposed": [[0, 2], [1, 3], [10, 12], [11, 13]],
        "broadcast": [1],
    }
    own = [
        {
            "ranks": (0, 2, 1, 2, 1),
            "scatter 0": [[10, 12]],
            "scatter 1": [[10], [14]],
            "to all": [[0, 1], [10, 11]],
            "uneven": [0, 10, 11],
        },
        {
            "ranks": (1, 2, 1, 2, 1),
            "scatter 0": [[14, 16]],
            "scatter 1": [[12], [16]],
            "to all": [[2, 3], [12, 13]],
            "uneven": [1, 2, 3, 12, 13],
        },
    ]
    for rank in range(2):
        assert found[rank] == {**expected_by_both, **own[rank]}
    assert [process.exitcode for process in processes] == [0, 0]
