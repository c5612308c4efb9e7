"""What is reserved on a device counts for all of its processes, and of those that end, however they do, no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xllm_platform.base import AllocatorStats, MemoryInfo, OutOfMemoryError

from tests.support.book_driver import GRANULE, BookDriver, fail_nth
from xllm_npu.memory.device_ledger import NUM_SLOTS, DeviceFull, DeviceLedger, LedgerShare
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

# Orders on standard input, an answer to each: +N, -N, share N FD, hold FD N, hammer LIMIT.
CHILD = """
import os, random, sys
from xllm_npu.memory.device_ledger import DeviceFull, DeviceLedger, LedgerShare
ledger, kept = DeviceLedger(sys.argv[1]), []
print("there", flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    numbers = [int(n) for n in numbers]
    if word == "reserve":
        ledger.reserve(numbers[0])
    elif word == "hold":
        kept.append(LedgerShare(numbers[0], numbers[1]))
    elif word == "hammer":
        rng, ledger.limit = random.Random(os.getpid()), numbers[0]
        for _ in range(numbers[1]):
            if rng.random() < 0.5:
                try:
                    ledger.reserve(rng.randrange(50))
                except DeviceFull:
                    pass
            else:
                ledger.release(rng.randint(0, ledger.reserved))
            assert ledger.total <= ledger.limit
        if len(numbers) > 2:
            print("hammering", flush=True)
            while True:
                ledger.reserve(1)
                ledger.release(1)
    print(ledger.reserved, flush=True)
"""


class Process:
    def __init__(self, path: Path, *fds: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True, env=environment, pass_fds=fds)
        assert self.heard() == "there"

    def heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def ask(self, order: str) -> int:
        self.tell(order)
        return int(self.heard())

    def end(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.communicate()


@contextmanager
def processes(path: Path, count: int, *fds: int) -> Iterator[list[Process]]:
    started = [Process(path, *fds) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.end()


def test_a_killed_process_gives_its_share_back(tmp_path):
    ledger = DeviceLedger(tmp_path / "device", limit=100)
    ledger.reserve(10)
    with processes(tmp_path / "device", 2) as (first, second):
        assert first.ask("reserve 60") == 60
        assert second.ask("reserve 25") == 25
        assert ledger.total == 95
        with pytest.raises(DeviceFull, match="95 bytes are reserved"):
            ledger.reserve(6)
        first.end(signal.SIGKILL)
        assert ledger.total == 35
        ledger.reserve(65)
        assert (ledger.reserved, ledger.total) == (75, 100)


def test_processes_that_change_it_together_and_die_in_between(tmp_path):
    ledger = DeviceLedger(tmp_path / "device", limit=200)
    with processes(tmp_path / "device", 3) as started:
        for process in started[:2]:
            process.tell("hammer 200 1500")
        started[2].tell("hammer 200 10 1")
        assert started[2].heard() == "hammering"
        for _ in range(300):
            assert ledger.total <= 200
        started[2].end()  # anywhere in a change
        left = [int(process.heard()) for process in started[:2]]
        assert ledger.total == sum(left)


def test_a_share_lives_until_the_last_process_that_has_it(tmp_path):
    path = tmp_path / "device"
    ledger = DeviceLedger(path)
    ledger.reserve(100)
    share = ledger.share(70)
    assert (ledger.reserved, ledger.total) == (30, 100)
    with processes(path, 2, share.file) as (first, second):
        for process in (first, second):
            process.ask(f"hold {share.file} 70")
        share.close()
        ledger.release(30)
        assert ledger.total == 70, "it was counted twice, or not"
        first.end()
        assert ledger.total == 70
        second.end()
        assert ledger.total == 0


def test_a_share_comes_back(tmp_path):
    ledger = DeviceLedger(tmp_path / "device")
    ledger.reserve(100)
    share = ledger.share(70)
    ledger.take_back(share)
    assert (ledger.reserved, ledger.total) == (100, 100)
    ledger.release(100)


def test_a_file_that_is_gone_serves_those_who_have_it(tmp_path):
    ledger, other = DeviceLedger(tmp_path / "device"), DeviceLedger(tmp_path / "device")
    (tmp_path / "device").unlink()
    ledger.reserve(5)
    other.reserve(6)
    share = ledger.share(5)
    assert other.total == 11
    share.close()
    assert other.total == 6


def test_all_slots_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("xllm_npu.memory.device_ledger.NUM_SLOTS", 2)
    assert NUM_SLOTS > 2
    first, second = DeviceLedger(tmp_path / "device"), DeviceLedger(tmp_path / "device")
    with pytest.raises(RuntimeError, match="all are taken"):
        DeviceLedger(tmp_path / "device")
    first.reserve(3)
    first.close()
    third = DeviceLedger(tmp_path / "device")
    assert (third.reserved, second.total) == (0, 0)


class LedgerMachine(RuleBasedStateMachine):
    """Descriptions of one file, as several processes have them, against plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "device"
        self.ledgers: list[tuple[DeviceLedger, int]] = []
        self.shares: list[tuple[list[LedgerShare], int]] = []

    @property
    def expected(self) -> int:
        return sum(own for _, own in self.ledgers) + sum(count for _, count in self.shares)

    @rule(limit=st.integers(10, 200))
    def open(self, limit):
        if len(self.ledgers) < 6:
            self.ledgers.append((DeviceLedger(self.path, limit), 0))

    @rule(data=st.data(), count=st.integers(0, 100))
    def reserve(self, data, count):
        if self.ledgers:
            i = data.draw(st.integers(0, len(self.ledgers) - 1))
            ledger, own = self.ledgers[i]
            if self.expected + count > ledger.limit:
                with pytest.raises(DeviceFull):
                    ledger.reserve(count)
            else:
                ledger.reserve(count)
                self.ledgers[i] = ledger, own + count

    @rule(data=st.data(), share=st.booleans())
    def release_or_share(self, data, share):
        if self.ledgers:
            i = data.draw(st.integers(0, len(self.ledgers) - 1))
            ledger, own = self.ledgers[i]
            count = data.draw(st.integers(0, own))
            if share:
                self.shares.append(([ledger.share(count)], count))
            else:
                ledger.release(count)
            self.ledgers[i] = ledger, own - count

    @rule(data=st.data())
    def hand_out(self, data):
        if self.shares:
            holders, count = data.draw(st.sampled_from(self.shares))
            holders.append(LedgerShare(os.dup(holders[0].file), count))

    @rule(data=st.data())
    def let_go(self, data):
        if self.shares:
            i = data.draw(st.integers(0, len(self.shares) - 1))
            holders, _ = self.shares[i]
            holders.pop(data.draw(st.integers(0, len(holders) - 1))).close()
            if not holders:
                del self.shares[i]

    @rule(data=st.data())
    def end(self, data):
        if self.ledgers:
            self.ledgers.pop(data.draw(st.integers(0, len(self.ledgers) - 1)))[0].close()

    @invariant()
    def agrees(self):
        for ledger, own in self.ledgers:
            assert (ledger.reserved, ledger.total) == (own, self.expected)

    def teardown(self):
        for ledger, _ in self.ledgers:
            ledger.close()
        for holders, _ in self.shares:
            for holder in holders:
                holder.close()
        self.directory.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# What asks it


def test_pools_of_one_device_share_its_ceiling(tmp_path):
    pools = [PhysicalPagePool(BookDriver(), GRANULE, 10, elastic=True,
                              ledger=DeviceLedger(tmp_path / "device", 12 * GRANULE)) for _ in "ab"]
    taken = pools[0].take(8)
    with pytest.raises(OutOfMemoryError, match="pass the limit"):
        pools[1].take(5)
    pools[1].take(4)
    pools[0].give(taken[:1])
    pools[1].take(1)
    for pool in pools:
        pool.check_integrity()


def test_a_page_that_cannot_be_made_is_not_reserved(tmp_path):
    driver, ledger = BookDriver(), DeviceLedger(tmp_path / "device")
    pool = PhysicalPagePool(driver, GRANULE, 10, elastic=True, ledger=ledger)
    driver.fault = fail_nth("create_page", 3)
    with pytest.raises(Exception, match="as the test says"):
        pool.take(5)
    assert ledger.total == 0
    pool.check_integrity()


def test_a_fixed_pool_counts_from_the_start(tmp_path):
    ledger = DeviceLedger(tmp_path / "device")
    pool = PhysicalPagePool(BookDriver(), GRANULE, 10, elastic=False, ledger=ledger)
    assert ledger.total == 10 * GRANULE
    pool.close()
    assert ledger.total == 0


def rule_of(path: Path, free: int, max_bytes: int, sharers: int = 1) -> GrowthRule:
    return GrowthRule(GrowthLimits(total_bytes=1000, max_bytes=max_bytes), lambda: MemoryInfo(free, 1000),
                      lambda: AllocatorStats(reserved=1, peak_reserved=1), sharers, DeviceLedger(path))


def test_rule_22_ceilings_are_shared_by_all_models_of_a_device(tmp_path):
    one, other = (rule_of(tmp_path / "device", 900, max_bytes=100) for _ in "ab")
    assert other.ledger is not None
    other.ledger.reserve(70)
    assert one.growable_bytes(0) == 30
    one.check(30, 0)
    with pytest.raises(PageGrowthRefused, match="of all models on the device, which leaves 30") as caught:
        one.check(31, 0)
    assert caught.value.reason == "ceiling"


def test_ranks_of_one_memory_may_each_take_their_part_to_the_last_byte(tmp_path):
    ranks = [rule_of(tmp_path / "device", 900, max_bytes=100, sharers=2) for _ in "ab"]
    assert [rank.growable_bytes(0) for rank in ranks] == [100, 100]
    for rank in ranks:
        rank.check(100, 0)
        assert rank.ledger is not None
        rank.ledger.reserve(100)
    assert [rank.growable_bytes(100) for rank in ranks] == [0, 0]


def test_pages_of_other_models_are_no_headroom(tmp_path):
    """Where there are no allocator's statistics: what another model's pages take comes back."""
    free = 900
    rule = GrowthRule(GrowthLimits(total_bytes=1000), lambda: MemoryInfo(free, 1000), AllocatorStats, 1,
                      DeviceLedger(tmp_path / "device"))
    other = DeviceLedger(tmp_path / "device")
    assert rule.growable_bytes(0) == 900
    other.reserve(500)
    free = 400
    assert rule.growable_bytes(0) == 400
    other.release(500)
    free = 900
    assert rule.growable_bytes(0) == 900
