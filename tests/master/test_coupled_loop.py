"""Engines that step together, each on a thread, over real sockets; their workers meet in every step as layers do."""

from __future__ import annotations

import queue
import random
import threading
import time

import numpy as np
import pytest

from tests.support.scripted_worker import ScriptedWorker, expected_output
from tests.support.server import poll
from tests.support.sleepy_memory import SleepyMemory
from xllm_npu.execution.engine import Engine
from xllm_npu.execution.worker_client import DirectWorker, InProcessWorker
from xllm_npu.master import step_exchange
from xllm_npu.master.coupled_loop import CoupledLoop
from xllm_npu.master.engine_process import EngineServer
from xllm_npu.master.step_agreement import StepNumbers
from xllm_npu.master.step_exchange import StepError, connect
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.messages import (
    AWAKE,
    FINISH_ABORT,
    PAUSED,
    SEQUENCES_PER_REQUEST,
    SLEEPING,
    TAGS,
    AbortRequest,
    AddRequest,
    EngineReady,
    Pause,
    Residency,
    Resume,
    Shutdown,
    Sleep,
    StepTogether,
    Wake,
    sequence_key,
)
from xllm_npu.state.sampling_params import SamplingParams

BLOCK, BLOCKS, ROWS, MAX_LEN, VOCAB = 4, 60, 8, 64, 1000
DEADLINE = 60.0


class MeetingWorker:
    """Runs a step only together with the other ranks' workers, which must agree about it."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list) -> None:
        self.worker = ScriptedWorker(BLOCKS, BLOCK, ROWS, VOCAB)
        self.rank, self.barrier, self.board = rank, barrier, board
        self.steps = self.empty = 0

    def execute(self, step):
        self.board[self.rank] = step.dp_tokens, step.dp_all_decode
        self.barrier.wait(DEADLINE)  # raises if another rank does not come
        assert all(said == self.board[0] for said in self.board), self.board
        tokens = step.array("num_new").sum()
        assert step.dp_tokens[self.rank] == tokens
        assert not step.dp_all_decode or step.num_decodes == step.array("rows").size
        self.barrier.wait(DEADLINE)
        self.steps += 1
        if step.step_id < 0:
            self.empty += 1
            assert (tokens, step.sample_rows, step.array("block_table").tolist()) == (1, b"", [0])
            return step_result(step)
        return self.worker.execute(step)

    def close(self):
        pass


def step_result(step):
    from xllm_npu.state.batch import StepResult

    return StepResult(step_id=step.step_id)


class RankMemory(Engine):
    """An engine whose memory sleeps: what it held is lost, and a step then is an error."""

    def __init__(self, client, worker: MeetingWorker) -> None:
        super().__init__(client, None, BLOCK)
        self._memory = SleepyMemory(self._lose)
        self._meeting = worker
        worker.worker.is_mapped = lambda block: self._memory.kv_is_mapped
        self._open = 0  # steps

    def send(self, step):
        self._open += 1
        super().send(step)

    def collect(self):
        self._open -= 1
        return super().collect()

    def _lose(self) -> None:
        self._meeting.worker.kv[:] = -12345

    def sleep(self, level):
        assert not self._open, "a step is in flight, perhaps an empty one"
        return self._memory.sleep(level)

    def wake(self, tags=TAGS):
        self._memory.wake(tags)


class FakeChannel:
    def __init__(self, worker: MeetingWorker) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list = []
        self.worker = worker
        self.steps_at_answer = 0

    def receive(self, wait):
        try:
            return self.inbox.get(timeout=1.0) if wait else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def send(self, message):
        if isinstance(message, Residency):
            self.steps_at_answer = self.worker.steps
        self.sent.append(message)


class Ranks:
    """`size` engines, driven as the HTTP process does, with each message delivered when `deliver` says so."""

    def __init__(self, size: int, directory, overlap: bool) -> None:
        self.size = size
        self.total = self.resumes = 0  # Resumes count as requests
        self.expected: dict[int, list[int]] = {}
        self.refused: set[int] = set()
        self.undelivered: list[list] = [[] for _ in range(size)]
        barrier, board = threading.Barrier(size), [None] * size
        self.workers = [MeetingWorker(rank, barrier, board) for rank in range(size)]
        self.channels = [FakeChannel(worker) for worker in self.workers]
        self.failures: list[BaseException] = []
        self.loops = [self._loop(rank, f"ipc://{directory}/agreement", overlap) for rank in range(size)]
        self.threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in self.threads:
            thread.start()

    def _loop(self, rank: int, endpoint: str, overlap: bool) -> CoupledLoop:
        scheduler = Scheduler(SchedulerOptions(
            max_seqs=ROWS, max_tokens=16, max_model_len=MAX_LEN, num_blocks=BLOCKS, block_size=BLOCK,
            eos_token_ids=()))
        worker = self.workers[rank]
        if overlap:
            client = InProcessWorker(lambda: worker)
            client.wait_made()
        else:
            client = DirectWorker(worker)
        ready = EngineReady(
            model_name="m", architecture="a", platform="cpu", device="d", dtype="float32", vocab_size=VOCAB,
            max_model_len=MAX_LEN, eos_token_ids=[], num_kv_blocks=BLOCKS - 1, block_size=BLOCK, max_seqs=ROWS,
            max_tokens_per_batch=16, weight_bytes=0, kv_cache_bytes=0, graph_sizes=[], load_seconds=0.0)
        return CoupledLoop(scheduler, RankMemory(client, worker), ready, overlap=overlap, rank=rank,
                           exchange=connect(endpoint, rank, self.size, DEADLINE))

    def _run(self, rank: int) -> None:
        try:
            EngineServer(self.channels[rank], self.loops[rank]).run()
        except BaseException as error:  # shown by `check`
            self.failures.append(error)
            raise

    def send(self, rank: int, prompt: list[int], max_tokens: int) -> int:
        self.total += 1
        request_id = self.total
        self.undelivered[rank].append(AddRequest(
            request_id=request_id, external_id=str(request_id), prompt=np.array(prompt, np.int32).tobytes(),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens), arrival_time=time.time()))
        for waiting in self.undelivered:
            waiting.append(StepTogether(self.total))
        if len(prompt) >= MAX_LEN:
            self.refused.add(request_id)
        else:
            self.expected[request_id] = expected_output(prompt, max_tokens, VOCAB)
        return request_id

    def deliver(self, rank: int, count: int = 10**9) -> None:
        for message in self.undelivered[rank][:count]:
            self.channels[rank].inbox.put(message)
        del self.undelivered[rank][:count]

    def outputs(self) -> tuple[dict[int, list[int]], set[int]]:
        """(tokens by request, requests that have ended)"""
        tokens: dict[int, list[int]] = {key: [] for key in self.expected}
        ended = set()
        for channel in self.channels:
            for message in list(channel.sent):
                if isinstance(message, Residency):
                    continue
                for key, token in zip(message.key_array().tolist(), message.token_array().tolist()):
                    tokens[key // SEQUENCES_PER_REQUEST].append(token)
                ended |= {end.key // SEQUENCES_PER_REQUEST for end in message.finished}
        return tokens, ended

    def ask(self, message) -> list[Residency]:
        """Have all ranks do it, as a model's residency does; what was to be delivered comes first.

        Returns their answers by rank.
        """
        before = [len(self.answers(rank)) for rank in range(self.size)]
        if isinstance(message, Resume):
            self.total += self.size
            self.resumes += self.size
        for rank in random.Random(self.total).sample(range(self.size), self.size):
            self.deliver(rank)
            self.channels[rank].inbox.put(message)
            if isinstance(message, Resume):
                self.channels[rank].inbox.put(StepTogether(self.total))
        for rank in range(self.size):
            poll(lambda rank=rank: len(self.answers(rank)) > before[rank] or self.failures, f"rank {rank}", DEADLINE)
        assert not self.failures, self.failures
        return [self.answers(rank)[-1] for rank in range(self.size)]

    def answers(self, rank: int) -> list[Residency]:
        return [m for m in list(self.channels[rank].sent) if isinstance(m, Residency)]

    def wait(self) -> None:
        """Until every request has ended and no rank has a turn to take."""
        def done() -> bool:
            assert not self.failures, self.failures
            ended = len(self.outputs()[1]) == self.total - self.resumes
            return ended and not any(loop.has_work() for loop in self.loops)

        poll(done, "the end of all requests", DEADLINE)

    def stop(self, order) -> None:
        for rank in order:
            self.channels[rank].inbox.put(Shutdown())
        for thread in self.threads:
            thread.join(DEADLINE)
        assert not any(thread.is_alive() for thread in self.threads), "a rank does not end"
        assert not self.failures, self.failures
        assert len({worker.steps for worker in self.workers}) == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals(tmp_path, overlap, seed):
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    ranks = Ranks(size, tmp_path, overlap)
    for _ in range(rng.randrange(5, 25)):
        rank = rng.randrange(size if rng.random() < 0.5 else 1)  # now and then only one rank has work
        length = MAX_LEN + 1 if rng.random() < 0.1 else rng.randrange(1, 40)
        ranks.send(rank, [rng.randrange(VOCAB) for _ in range(length)], rng.randrange(1, 12))
        for other in rng.sample(range(size), size):
            if rng.random() < 0.7:
                ranks.deliver(other, rng.randrange(1, 4))
        if rng.random() < 0.2:
            for other in range(size):
                ranks.deliver(other)
            ranks.wait()  # all idle, then the next wave
    for other in range(size):
        ranks.deliver(other)
    ranks.wait()
    tokens, ended = ranks.outputs()
    assert tokens == ranks.expected
    assert ended == ranks.expected.keys() | ranks.refused
    for loop in ranks.loops:
        loop.scheduler.check_integrity()
    ranks.stop(rng.sample(range(size), size))
    scheduled = sum(worker.steps - worker.empty for worker in ranks.workers)
    assert scheduled >= ranks.workers[0].steps, "a step in which nobody had anything to run"


def test_idle_ranks_run_along_and_stop(tmp_path):
    ranks = Ranks(2, tmp_path, overlap=True)
    ranks.send(1, [1, 2, 3], 9)
    for rank in (0, 1):
        ranks.deliver(rank)
    ranks.wait()
    steps = ranks.workers[0].steps
    assert steps == ranks.workers[0].empty == 9
    assert (ranks.workers[1].steps, ranks.workers[1].empty) == (9, 0)
    ranks.stop((0, 1))
    assert ranks.workers[0].steps == steps


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("overlap", [True, False])
def test_shutdown_in_the_middle_of_a_wave(tmp_path, overlap, order):
    ranks = Ranks(3, tmp_path, overlap)
    for rank in (0, 1):
        ranks.send(rank, [rank], MAX_LEN - 2)
    for rank in range(3):
        ranks.deliver(rank)
    poll(lambda: ranks.workers[2].steps > 3, "the wave")
    ranks.stop(order)


def test_a_client_that_leaves(tmp_path):
    ranks = Ranks(2, tmp_path, overlap=True)
    request_id = ranks.send(0, [1], MAX_LEN - 2)
    for rank in (0, 1):
        ranks.deliver(rank)
    poll(lambda: ranks.workers[1].steps > 3, "the wave")
    ranks.channels[0].inbox.put(AbortRequest([sequence_key(request_id, 0)], FINISH_ABORT))
    poll(lambda: not any(loop.has_work() for loop in ranks.loops), "the end of the wave")
    ranks.stop((1, 0))


# Pauses and sleep


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_pause_and_sleep_together(tmp_path, overlap, seed):
    """Between arrivals, at any moment of a wave: kept requests go on, and nobody waits for one that sleeps."""
    rng = random.Random(seed)
    size = rng.choice((2, 3))
    ranks = Ranks(size, tmp_path, overlap)
    for turn in range(5):
        for _ in range(rng.randrange(1, 7)):
            ranks.send(rng.randrange(size), [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))],
                       rng.randrange(1, 20))
            for rank in range(size):
                if rng.random() < 0.5:
                    ranks.deliver(rank, rng.randrange(1, 4))
        mode = rng.choice(("keep", "keep", "wait"))
        assert {a.state for a in ranks.ask(Pause(mode))} == {PAUSED}
        assert [c.steps_at_answer for c in ranks.channels] == [w.steps for w in ranks.workers], "it paused later"
        if mode == "wait":
            assert len(ranks.outputs()[1]) == ranks.total - ranks.resumes
        steps = [w.steps for w in ranks.workers]
        if rng.random() < 0.7:
            level = rng.choice((1, 2))
            assert {(a.state, a.level) for a in ranks.ask(Sleep(level, "keep"))} == {(SLEEPING, level)}
            if rng.random() < 0.5:
                ranks.send(rng.randrange(size), [turn], 3)  # it was sent before the ranks were told to sleep
                ranks.ask(Pause("keep"))
            assert {a.state for a in ranks.ask(Wake(["weights"]))} == {SLEEPING}
            assert {a.state for a in ranks.ask(Wake([]))} == {PAUSED}
        assert [w.steps for w in ranks.workers] == steps, "a step was run in the pause"
        assert {a.state for a in ranks.ask(Resume())} == {AWAKE}
    ranks.wait()
    tokens, ended = ranks.outputs()
    assert tokens == ranks.expected
    assert ended == ranks.expected.keys()
    for loop in ranks.loops:
        loop.scheduler.check_integrity()
    ranks.stop(rng.sample(range(size), size))


def test_an_abort_reaches_who_waits_while_ranks_sleep(tmp_path):
    ranks = Ranks(2, tmp_path, overlap=True)
    for rank in (0, 1):
        ranks.send(rank, [1 + rank], MAX_LEN - 2)
        ranks.deliver(0)
        ranks.deliver(1)
    poll(lambda: ranks.workers[1].steps > 3, "the wave")
    ranks.ask(Pause("keep"))
    ranks.ask(Sleep(1, "keep"))
    assert ranks.outputs()[1] == set()
    ranks.ask(Pause("abort"))
    ends = [end for channel in ranks.channels for m in channel.sent if not isinstance(m, Residency)
            for end in m.finished]
    assert sorted((e.key, e.reason) for e in ends) == [(sequence_key(i, 0), FINISH_ABORT) for i in (1, 2)]
    ranks.stop((1, 0))


# Ranks that do not come


def say(rank: int, turn: int = 0) -> StepNumbers:
    return StepNumbers(rank=rank, turn=turn)


def test_who_does_not_come_is_named(tmp_path):
    endpoint = f"ipc://{tmp_path}/agreement"
    first, second = connect(endpoint, 0, 4, 0.5), connect(endpoint, 1, 4, 0.5)
    failure: list[BaseException] = []

    def come() -> None:
        try:
            second.exchange(say(1))
        except StepError as error:
            failure.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(StepError, match=r"Data-parallel ranks 2, 3 did not come to step 0 within"):
        first.exchange(say(0))
    thread.join(DEADLINE)
    assert "Data-parallel rank 0 did not answer at step 0" in str(failure[0])
    first.close()
    second.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_connection_shortens_the_wait(tmp_path, monkeypatch, gone):
    monkeypatch.setattr(step_exchange, "LOST_SECONDS", 0.3)
    endpoint = f"ipc://{tmp_path}/agreement"
    both = [connect(endpoint, rank, 2, 600) for rank in (0, 1)]
    thread = threading.Thread(target=both[1].exchange, args=(say(1),))
    thread.start()
    assert both[0].exchange(say(0)) == [say(0), say(1)]
    thread.join(DEADLINE)
    both[gone].close()
    began = time.monotonic()
    with pytest.raises(StepError, match=f"Data-parallel rank {gone} did not"):
        both[1 - gone].exchange(say(1 - gone, turn=1))
    assert time.monotonic() - began < DEADLINE
    both[1 - gone].close()


def test_strangers_are_ignored(tmp_path):
    import zmq

    endpoint = f"ipc://{tmp_path}/agreement"
    first, second = connect(endpoint, 0, 2, 30), connect(endpoint, 1, 2, 30)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(endpoint)
        for message in (b"hello", b"", step_exchange.msgspec.msgpack.encode(say(1, turn=9))):
            stranger.send(message)
        answer: list = []
        thread = threading.Thread(target=lambda: answer.append(second.exchange(say(1))))
        thread.start()
        assert first.exchange(say(0)) == [say(0), say(1)]
        thread.join(DEADLINE)
        assert answer == [[say(0), say(1)]]
    first.close()
    second.close()
