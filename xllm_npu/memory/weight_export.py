"""A worker's weights for other processes of the machine: they import the pages that these weights lie in.

A thread listens on a Unix socket. Who connects names its layout, which must be the same, and gets the pages a batch at
a time, by descriptors or numbers (see VirtualMemoryDriver.export_page). The open connection is its lease: for as long
as one is open, the pages count in the device's ledger for all that have them together, whoever ends first. The pages
live as long as anybody has them; this worker may let go of its weights at any time. Knows no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import selectors
import socket
import threading
from typing import Literal

import msgspec

from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_resources import WorkerMemoryResources

log = logging.getLogger(__name__)

BATCH = 128  # pages in one message; the system passes at most 253 descriptors at once
MESSAGE_BYTES = 16384
ANSWER_SECONDS = 20.0  # for an importer to take a batch

Passing = Literal["descriptor", "number"]


class WantWeights(msgspec.Struct, tag=True):
    importer: int  # VirtualMemoryDriver.importer
    layout: str  # as `layout_digest` says


class WeightPages(msgspec.Struct, tag=True):
    """With the descriptors of the pages, if they go by descriptor; before those of the first batch the ledger's, if
    there is one."""

    count: int
    numbers: list[int]
    share_bytes: int  # -1: no ledger's descriptor comes with it


class Refused(msgspec.Struct, tag=True):
    message: str


class Taken(msgspec.Struct, tag=True):
    """The batch has been imported."""


Answer = WeightPages | Refused


def layout_digest(region: WeightRegion) -> str:
    """Regions whose pages can stand for each other have the same."""
    text = f"{region.page_bytes} {region.num_pages} {region.layout.extents}"
    return hashlib.sha256(text.encode()).hexdigest()


class WeightExporter:
    def __init__(self, path: str, resources: WorkerMemoryResources, passing: Passing) -> None:
        """Listens at `path` until `close`; the weights are loaded. Raises OSError."""
        assert resources.weights is not None
        self._resources, self._region, self._passing = resources, resources.weights, passing
        self._leases: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._bell, self._ears = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for one in (self._listener, self._ears):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="weight-export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Importers keep what they have."""
        self._bell.close()
        self._thread.join()
        for one in (self._listener, self._ears, *self._leases):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ears:
                    return
                if key.fileobj is self._listener:
                    self._welcome(self._listener.accept()[0])
                elif isinstance(key.fileobj, socket.socket):  # a lease says nothing but its end
                    self._end(key.fileobj)

    def _welcome(self, importer: socket.socket) -> None:
        importer.settimeout(ANSWER_SECONDS)
        self._leases.add(importer)
        try:
            wanted = msgspec.msgpack.decode(importer.recv(MESSAGE_BYTES), type=WantWeights)
            self._export_to(importer, wanted)
        except _NotNow as refusal:
            with contextlib.suppress(OSError):
                importer.send(msgspec.msgpack.encode(Refused(str(refusal))))
            self._end(importer, registered=False)
        except Exception:  # it went away, or is none of ours
            log.debug("weights could not be exported", exc_info=True)
            self._end(importer, registered=False)
        else:
            self._selector.register(importer, selectors.EVENT_READ)

    def _export_to(self, importer: socket.socket, wanted: WantWeights) -> None:
        """Raises _NotNow, OSError."""
        if wanted.layout != layout_digest(self._region):
            raise _NotNow("its weights lie in another layout, so that the settings must differ.")
        r = self._resources
        with r.exclusive():
            pages = self._region.pages()
            share = r.pool.lend(pages)
        for first in range(0, len(pages), BATCH):
            batch = pages[first : first + BATCH]
            with r.exclusive():
                if self._region.pages() != pages:
                    raise _NotNow("its weights went to sleep.")
                exported = [r.pool.driver.export_page(r.pool.handle(page), wanted.importer) for page in batch]
            owned = exported if self._passing == "descriptor" else []
            passed = [*([share.file] if share is not None and not first else []), *owned]
            message = WeightPages(len(batch), [] if owned else exported,
                                  share.count if share is not None and not first else -1)
            try:
                socket.send_fds(importer, [msgspec.msgpack.encode(message)], passed)
            finally:
                for descriptor in owned:
                    os.close(descriptor)
            msgspec.msgpack.decode(importer.recv(MESSAGE_BYTES), type=Taken)
        if not pages:
            raise _NotNow("its weights are asleep.")

    def _end(self, lease: socket.socket, registered: bool = True) -> None:
        if registered:
            self._selector.unregister(lease)
        lease.close()
        self._leases.discard(lease)
        if not self._leases:
            with self._resources.exclusive():
                self._resources.pool.take_back()


class _NotNow(Exception):
    """Why there are no pages to be had."""
