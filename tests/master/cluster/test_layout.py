"""Ranks over machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_npu.master.cluster.layout import LayoutError, Offer, place_ranks
from xllm_npu.state.launch import Slot


def cards(*counts: int, first_node: int = 0) -> list[Offer]:
    return [Offer(node, tuple(range(count))) for node, count in enumerate(counts, first_node)]


def placed(slots: list[Slot]) -> list[tuple[int, int]]:
    return [(slot.node, slot.device) for slot in slots]


def test_ranks_in_order():
    assert placed(place_ranks(cards(2, 2), 2, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_equal_shares_leave_devices_idle():
    assert placed(place_ranks(cards(8, 4), 2, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_unequal_machines_give_all_they_have():
    assert placed(place_ranks(cards(1, 3), 2, 2)) == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_a_first_machine_that_holds_no_rank():
    assert placed(place_ranks(cards(1, 1, first_node=1), 2, 1)) == [(1, 0), (2, 0)]


def test_the_devices_that_are_offered():
    assert placed(place_ranks([Offer(0, (4, 5)), Offer(1, (6, 7))], 4, 1)) == [(0, 4), (0, 5), (1, 6), (1, 7)]


def test_shared_devices_are_as_many_as_needed():
    offers = [Offer(node, (0,), shared=True) for node in range(2)]
    assert placed(place_ranks(offers, 2, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(LayoutError, match="make that a multiple of 2"):
        place_ranks(offers, 3, 1)


@pytest.mark.parametrize(
    ("counts", "tp", "dp", "said"),
    [
        ((8, 4), 8, 2, "needs 16 devices, and node 0 has 8, node 1 has 4: --tp-size=6 would use them all"),
        ((8, 8), 8, 4, "needs 32 devices, and node 0 has 8, node 1 has 8: --dp-size=2 or --tp-size=4 would use"),
        ((1, 2), 2, 2, "their product must be 3"),
        ((0, 0), 1, 2, "node 0 has 0"),
    ],
)
def test_numbers_that_do_not_fit(counts, tp, dp, said):
    with pytest.raises(LayoutError, match=said):
        place_ranks(cards(*counts), tp, dp)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(1, 8), st.integers(1, 4))
def test_every_rank_has_a_device_of_its_own(counts, tp, dp):
    offers = cards(*counts)
    try:
        slots = placed(place_ranks(offers, tp, dp))
    except LayoutError:
        assert sum(counts) != tp * dp
        return
    assert len(set(slots)) == len(slots) == tp * dp
    assert slots == sorted(slots)
    assert all(device in offers[node].devices for node, device in slots)
