"""All ranks of an engine check and load, or none: over ranks that do as the test says."""

from __future__ import annotations

import threading

import pytest

from xllm_npu.execution.engine_weights import EngineWeights, LoadFailed, WeightsLost
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.weight_update import WeightsRefused
from xllm_npu.execution.worker_messages import WorkerCheckWeights, WorkerLoadWeights

OLD, NEW = "old", "new"


class Ranks:
    """Three of them, rank 0 among them."""

    def __init__(self) -> None:
        self.weights = [OLD] * 3
        self.refuse: dict[tuple[int, str], str] = {}  # rank, checkpoint -> why it cannot be loaded
        self.dead: Exception | None = None
        self.asked: list[WorkerCheckWeights | WorkerLoadWeights] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    # Rank 0

    def check(self, checkpoint: str) -> None:
        if why := self.refuse.get((0, checkpoint)):
            raise WeightsRefused(why)

    def load_weights(self, checkpoint: str) -> None:
        self._load(0, checkpoint)
        if why := self.refuse.get((0, checkpoint)):
            raise LoadError(why)

    def _load(self, rank: int, checkpoint: str) -> None:
        self.weights[rank] = "broken" if (rank, checkpoint) in self.refuse else checkpoint

    # The others

    def ask(self, message: WorkerCheckWeights | WorkerLoadWeights) -> None:
        self.asked.append(message)

    def answers(self) -> list[str]:
        assert self.may_answer.wait(10)
        message = self.asked[-1]
        if self.dead is not None:
            raise self.dead
        if isinstance(message, WorkerLoadWeights):
            for rank in (1, 2):
                self._load(rank, message.checkpoint)
        return [self.refuse[rank, message.checkpoint] for rank in (1, 2) if (rank, message.checkpoint) in self.refuse]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def engine_of(ranks: Ranks) -> EngineWeights:
    return EngineWeights(ranks, ranks, ranks, OLD)


@pytest.mark.parametrize("rank", range(3))
def test_any_rank_refuses_for_all(ranks, rank):
    ranks.refuse[rank, NEW] = "It does not fit."
    engine = engine_of(ranks)
    with pytest.raises(WeightsRefused, match="does not fit"):
        engine.check(NEW).result(10)
    assert (ranks.weights, engine.checkpoint) == ([OLD] * 3, OLD)
    assert engine.check("another").result(10) is None


@pytest.mark.parametrize("rank", range(3))
def test_where_one_rank_fails_all_have_the_old_weights(ranks, rank):
    ranks.refuse[rank, NEW] = "The disk is gone."
    engine = engine_of(ranks)
    with pytest.raises(LoadFailed, match="disk is gone"):
        engine.load(NEW)
    assert (ranks.weights, engine.checkpoint) == ([OLD] * 3, OLD)
    del ranks.refuse[rank, NEW]
    engine.load(NEW)
    assert (ranks.weights, engine.checkpoint) == ([NEW] * 3, NEW)
    ranks.refuse[rank, "newer"] = "No."
    with pytest.raises(LoadFailed):
        engine.load("newer")
    assert ranks.weights == [NEW] * 3


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 0), (2, 1)])
def test_where_the_old_ones_are_gone_too_it_is_fatal(ranks, first, second, caplog):
    ranks.refuse = {(first, NEW): "No disk.", (second, OLD): "No files."}
    with pytest.raises(WeightsLost, match="nor the old ones") as lost:
        engine_of(ranks).load(NEW)
    assert "No" not in str(lost.value), "clients hear this, and files are none of their business"
    assert [record.message for record in caplog.records] == [
        "loading new failed, and the old weights are loaded again: No disk.",
        "the old weights cannot be loaded either: No files."]


def test_a_rank_that_dies_is_fatal(ranks):
    engine = engine_of(ranks)
    ranks.dead = RuntimeError("Rank 2 was ended by SIGKILL.")
    with pytest.raises(RuntimeError, match="SIGKILL"):
        engine.check(NEW).result(10)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        engine.load(NEW)


def test_a_check_holds_nobody_up(ranks):
    ranks.may_answer.clear()
    checked = engine_of(ranks).check(NEW)
    assert not checked.done()
    ranks.may_answer.set()
    assert checked.result(10) is None


def test_one_rank_alone(ranks):
    engine = EngineWeights(ranks, ranks, None, OLD)
    engine.check(NEW).result(10)
    engine.load(NEW)
    assert (ranks.weights, ranks.asked) == ([NEW, OLD, OLD], [])
