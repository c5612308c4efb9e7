"""ProcessGroupHCCL between two processes over the fake HCCL: the project's collectives, messages, graphs, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import World, run_ranks

pytestmark = [pytest.mark.npu_lab, pytest.mark.multiprocess]
LONG = 300_000  # elements; more than HCCL's fake shows at a time


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECANN_DEVICES", "2")
        return run_ranks(both, 2)


def both(world: World) -> dict[str, Any]:
    """Everything that one pair of ranks can show; the answer's values are lists and strings."""
    import torch
    from xllm_platform.registry import select

    platform = select("npu")
    platform.configure_process()
    platform.set_device(world.rank)
    found: dict[str, Any] = {}
    with world.join(platform.collective_backend, tp_size=2, ep_size=2) as parallel, torch.inference_mode():
        device = platform.device()
        found |= reductions(world.rank, parallel.tp, device)
        found |= exchanges(world.rank, parallel.tp, device)
        found |= messages(world.rank, device)
        found["in graph"] = in_graph(world.rank, parallel.tp, device)
        found["refused"] = refused(device)
        found["name"] = platform.communicator_name(parallel.tp)
        found["cold"] = captured_cold(world.rank, device)
    return found


def reductions(rank: int, group: Any, device: Any) -> dict[str, Any]:
    import torch
    from xllm_platform import collectives

    found: dict[str, Any] = {}
    x = torch.arange(4.0).reshape(2, 2).to(device) + 10 * rank  # rank 0: 0..3, rank 1: 10..13
    for op in ("sum", "avg", "max", "min"):
        found[op] = collectives.all_reduce(x.clone(), group, op).tolist()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        long = torch.full((LONG,), rank + 1, dtype=dtype, device=device)
        found[str(dtype)] = collectives.all_reduce(long, group).unique().tolist()
    for dim in (0, 1):
        found[f"scatter {dim}"] = collectives.reduce_scatter(x, group, dim).tolist()
    return found


def exchanges(rank: int, group: Any, device: Any) -> dict[str, Any]:
    import torch
    from xllm_platform import collectives

    x = torch.arange(4.0).reshape(2, 2).to(device) + 10 * rank
    found: dict[str, Any] = {f"gather {d}": collectives.all_gather(x, group, d).tolist() for d in (0, 1)}
    rows = torch.arange(4, device=device) + 10 * rank
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    found["uneven"] = collectives.all_to_all(rows, group, sent, received).tolist()
    found["broadcast"] = collectives.broadcast(torch.tensor([rank], device=device), group, source=1).tolist()
    collectives.barrier(group)
    return found


def messages(rank: int, device: Any) -> dict[str, Any]:
    """Each sends the other more than a letter holds, before it receives."""
    import torch
    import torch.distributed as dist

    sent = torch.arange(LONG, dtype=torch.float32, device=device) + rank
    received = torch.zeros_like(sent)
    peer = 1 - rank
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    for one in work:
        one.wait()
    return {"messages": (received - torch.arange(LONG, device=device)).unique().tolist()}


def in_graph(rank: int, group: Any, device: Any) -> list[list[float]]:
    import torch
    from xllm_platform import collectives

    x = torch.zeros(4, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = collectives.all_reduce(x * 2, group) + 1
    found = []
    for value in (1, 5):
        x.fill_(value * (rank + 1))
        graph.replay()
        found.append(y.tolist())
    return found


def captured_cold(rank: int, device: Any) -> list[str]:
    """A collective of a new group in a capture: without a run before, and with the runs that a backend makes."""
    import torch
    import torch.distributed as dist
    from xllm_platform.base import PlatformError
    from xllm_platform.collectives import all_reduce
    from xllm_platform.parallel import Group
    from xllm_platform.registry import select

    found = []
    x = torch.full((4,), rank + 1.0, device=device)
    for runs in (0, 2):
        group = Group((0, 1), rank, dist.new_group([0, 1]))
        backend = select("npu").graph_backend()
        backend.WARM_UP_RUNS = runs
        try:
            graph = backend.capture(lambda: all_reduce(x * 2, group))  # noqa: B023
        except PlatformError as error:
            found.append(str(error))
        else:
            found.append(str(graph.replay().tolist()))
    return found


def refused(device: Any) -> list[str]:
    """What torch_npu's own checks say to a reduction and a dtype that HCCL lacks."""
    import torch
    import torch.distributed as dist

    words = []
    for dtype, op in ((torch.int32, dist.ReduceOp.BAND), (torch.float64, dist.ReduceOp.SUM)):
        try:
            dist.all_reduce(torch.ones(2, dtype=dtype, device=device), op=op)
        except RuntimeError as error:
            words.append(str(error))
    return words


def test_reductions(answers) -> None:
    for rank, found in enumerate(answers):
        assert found["sum"] == [[10, 12], [14, 16]]
        assert found["avg"] == [[5, 6], [7, 8]]
        assert found["max"] == [[10, 11], [12, 13]]
        assert found["min"] == [[0, 1], [2, 3]]
        assert [found[f"torch.{t}"] for t in ("float32", "bfloat16", "float16", "int32")] == [[3]] * 4
        assert found["scatter 0"] == [[[10, 12]], [[14, 16]]][rank]
        assert found["scatter 1"] == [[[10], [14]], [[12], [16]]][rank]


def test_exchanges(answers) -> None:
    for found in answers:
        assert found["gather 0"] == [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert found["gather 1"] == [[0, 1, 10, 11], [2, 3, 12, 13]]
        assert found["broadcast"] == [1]
    assert [found["uneven"] for found in answers] == [[0, 10, 11], [1, 2, 3, 12, 13]]
    assert [found["messages"] for found in answers] == [[1.0], [0.0]]


def test_a_collective_in_a_graph(answers) -> None:
    for found in answers:
        assert found["in graph"] == [[7.0] * 4, [31.0] * 4]


def test_what_hccl_lacks_is_refused(answers) -> None:
    for found in answers:
        assert len(found["refused"]) == 2
        assert all("HCCL" in words for words in found["refused"])


def test_a_communicator_is_made_before_a_capture(answers) -> None:
    for found in answers:
        refused, replayed = found["cold"]
        assert "cannot be captured" in refused
        assert replayed == str([6.0] * 4)


def test_fused_operators_get_the_communicators_name(answers) -> None:
    assert answers[0]["name"]
    assert answers[0]["name"] == answers[1]["name"]
