"""Where the contents of weights are while these have no pages: in host memory, or in the files they came from.

On a device with memory of its own, level 1 copies them to the host (pinned, where the platform has it). Where the
host's memory is the device's (a CPU), a copy would take what sleeping gives back: there level 1 reads the checkpoint
again, as level 2 does everywhere, and compares a hash of the contents. Nothing here knows pages or transactions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xllm_npu.memory.weight_regions import WeightRegion

if TYPE_CHECKING:
    import torch


class WeightsChanged(RuntimeError):
    """The checkpoint's files give other weights than those that were asleep."""


class WeightLoader(Protocol):
    """The way in which a model's weights were loaded at start."""

    def check(self) -> None:
        """Raise if they could not be loaded now."""
        ...

    def load(self) -> None:
        """Fill the weights, whose pages are there, once more."""
        ...


class KeptContents(Protocol):
    def save(self, region: WeightRegion) -> None:
        """Take the contents of weights that are mapped; what it raises means that they cannot be kept.

        Where they are asleep already, what is left of them is known to be elsewhere.
        """
        ...

    def restore(self, region: WeightRegion) -> None:
        """Put them back into mapped weights, bit for bit, as often as asked for."""
        ...


class HostMemoryShort(RuntimeError):
    """The host has no room for a copy of the weights; the message says how much there is."""


class HostCopy:
    def __init__(self, pinned: bool, synchronize: Callable[[], None], room: Callable[[], int]) -> None:
        """`room`: bytes of host memory that this worker may take now."""
        self._pinned, self._synchronize, self._room = pinned, synchronize, room
        self._chunks: list[torch.Tensor] = []

    def save(self, region: WeightRegion) -> None:
        import torch

        room = self._room()
        if region.layout.size > room:  # the system would end a process that took more
            raise HostMemoryShort(f"A copy of the weights takes {region.layout.size:,} bytes of host memory, and "
                                  f"{room:,} may be had: free some, or sleep at level 2.")
        for chunk in region.chunks():
            kept = torch.empty(chunk.shape, dtype=torch.uint8, pin_memory=self._pinned)
            kept.copy_(chunk, non_blocking=self._pinned)
            self._chunks.append(kept)
        self._synchronize()

    def restore(self, region: WeightRegion) -> None:
        for chunk, kept in zip(region.chunks(), self._chunks, strict=True):
            chunk.copy_(kept, non_blocking=self._pinned)
        self._synchronize()


class CheckpointFiles:
    def __init__(self, loader: WeightLoader, synchronize: Callable[[], None], *, unchanged: bool) -> None:
        """`unchanged`: the weights that come back must be those that went, bit for bit."""
        self._loader, self._synchronize, self._unchanged = loader, synchronize, unchanged
        self._hash: int | None = None

    def save(self, region: WeightRegion) -> None:
        self._loader.check()
        if self._unchanged and region.is_mapped:
            self._hash = region.content_hash()

    def restore(self, region: WeightRegion) -> None:
        self._loader.load()
        self._synchronize()
        if self._hash is not None and region.content_hash() != self._hash:
            raise WeightsChanged("The checkpoint's files have changed since the weights were loaded: restart the "
                                 "model, or bring the files back.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOptions:
    """How a worker's weights come back."""

    loader: WeightLoader
    host_copy: bool  # whether the host has memory that is not the device's
    pinned: bool
    empty_cache: Callable[[], None]  # of the device's caching allocator
    host_room: Callable[[], int] = lambda: 2**62  # bytes that a copy may take
    empty_host_cache: Callable[[], None] = lambda: None  # of that of pinned memory

    def contents(self, level: int, synchronize: Callable[[], None]) -> KeptContents:
        if level == 1 and self.host_copy:
            return HostCopy(self.pinned, synchronize, self.host_room)
        return CheckpointFiles(self.loader, synchronize, unchanged=level == 1)


def on_its_own_thread(work: Callable[[], None]) -> None:
    """Copying and loading compute in parallel, and OpenMP keeps a team for each thread that does: this one ends."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again where it was asked for
            raised.append(error)

    thread = threading.Thread(target=run, name="weights")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
