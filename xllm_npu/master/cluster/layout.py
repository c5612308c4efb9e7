"""Which rank runs on which device of which machine: ranks in order over machines in order, node 0 first.

Pure: machines are numbers here. Tensor-parallel ranks are neighbours, so that they share a machine where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xllm_npu.state.launch import Slot


class LayoutError(RuntimeError):
    """The machines' devices are not what the ranks need; the message has the numbers that would work."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one machine lends."""

    node: int
    devices: tuple[int, ...]  # their indices there
    shared: bool = False  # any number of ranks may be put on one device


def place_ranks(offers: Sequence[Offer], tp_size: int, dp_size: int) -> list[Slot]:
    """[dp_size * tp_size] slots by world rank: as many ranks on each machine where that works, else all its devices.

    `offers` are in node order and hold only machines that lend something. Raises LayoutError.
    """
    world = tp_size * dp_size
    share, rest = divmod(world, len(offers))
    if not rest and all(offer.shared or len(offer.devices) >= share for offer in offers):
        return [Slot(offer.node, device) for offer in offers for device in _devices(offer, share)]
    if any(offer.shared for offer in offers):
        raise LayoutError(f"{len(offers)} machines cannot share {world} ranks (--tp-size={tp_size} times --dp-size="
                          f"{dp_size}) equally: make that a multiple of {len(offers)}.")
    if sum(len(offer.devices) for offer in offers) == world:
        return [Slot(offer.node, device) for offer in offers for device in offer.devices]
    raise LayoutError(_what_would_work(offers, tp_size, dp_size))


def _devices(offer: Offer, count: int) -> Sequence[int]:
    return range(count) if offer.shared else offer.devices[:count]


def _what_would_work(offers: Sequence[Offer], tp_size: int, dp_size: int) -> str:
    counts = [len(offer.devices) for offer in offers]
    total = sum(counts)
    described = ", ".join(f"node {offer.node} has {len(offer.devices)}" for offer in offers)
    choices = [f"--dp-size={total // tp_size}"] if total and total % tp_size == 0 else []
    choices += [f"--tp-size={total // dp_size}"] if total and total % dp_size == 0 else []
    hint = f"{' or '.join(choices)} would use them all" if choices else f"their product must be {total}"
    return (f"--tp-size={tp_size} times --dp-size={dp_size} needs {tp_size * dp_size} devices, and {described}: {hint};"
            " or make fewer devices visible.")
