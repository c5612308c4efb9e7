"""The pages of another process's weights, in place of own ones: the other end of weight_export.py.

What is imported is only read. It is held by a lease, an open connection, and counted in the device's ledger together
with everybody else who has it. Knows no model.
"""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec
from xllm_platform.base import PlatformError

from xllm_npu.memory.device_ledger import LedgerShare
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.memory.weight_export import (
    ANSWER_SECONDS,
    BATCH,
    MESSAGE_BYTES,
    Answer,
    Refused,
    Taken,
    WantWeights,
    WeightPages,
    layout_digest,
)
from xllm_npu.memory.weight_regions import WeightRegion


class WeightsUnavailable(RuntimeError):
    """The other process does not share its weights now; the message says why."""


class WeightImporter:
    def __init__(self, path: str, pool: PhysicalPagePool) -> None:
        """From the exporter that listens at `path`."""
        self._path, self._pool = path, pool
        self._lease: socket.socket | None = None
        self._share: LedgerShare | None = None

    def take(self, region: WeightRegion) -> list[int]:
        """Pages to map into `region`, with all weights in them. Raises WeightsUnavailable, and then has none."""
        assert self._lease is None
        handles: list[int] = []
        try:
            self._lease = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._lease.settimeout(2 * ANSWER_SECONDS)
            self._lease.connect(self._path)
            wanted = WantWeights(self._pool.driver.importer, layout_digest(region))
            self._lease.send(msgspec.msgpack.encode(wanted))
            while len(handles) < region.num_pages:
                self._take_batch(handles)
        except (OSError, msgspec.MsgspecError, PlatformError, WeightsUnavailable) as error:
            for handle in handles:
                self._pool.driver.release_page(handle)
            self.release()
            if isinstance(error, WeightsUnavailable):
                raise
            raise WeightsUnavailable(f"The other model's weights cannot be shared: {error}") from error
        return self._pool.adopt(handles)

    def _take_batch(self, handles: list[int]) -> None:
        """Adds to `handles`. Raises what makes the batch useless."""
        assert self._lease is not None
        data, descriptors, _, _ = socket.recv_fds(self._lease, MESSAGE_BYTES, BATCH + 1)
        try:
            if not data:
                raise WeightsUnavailable("The other model has ended.")
            answer = msgspec.msgpack.decode(data, type=Answer)
            if isinstance(answer, Refused):
                raise WeightsUnavailable(f"The other model does not share its weights: {answer.message}")
            if answer.share_bytes >= 0:
                self._share = LedgerShare(descriptors.pop(0), answer.share_bytes)
            self._import(answer, descriptors, handles)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._lease.send(msgspec.msgpack.encode(Taken()))

    def _import(self, answer: WeightPages, descriptors: list[int], handles: list[int]) -> None:
        pages = descriptors or answer.numbers
        if len(pages) != answer.count:  # descriptors are lost where this process may open no more
            raise WeightsUnavailable(f"{answer.count} pages were sent and {len(pages)} came.")
        for page in pages:
            handles.append(self._pool.driver.import_page(page, self._pool.page_bytes))

    def release(self) -> None:
        """The pages have been given back."""
        if self._share is not None:
            self._share.close()
        if self._lease is not None:
            with contextlib.suppress(OSError):
                self._lease.close()
        self._lease = self._share = None
