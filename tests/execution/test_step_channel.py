"""Steps from one engine to several workers: all of them, in order, whole, whether near or far."""

import os

import numpy as np
import pytest

from xllm_npu.execution.shm_ring import RingReader, RingWriter
from xllm_npu.execution.step_channel import StepReceiver, StepSender
from xllm_npu.execution.step_message import StepInput
from xllm_npu.execution.worker_messages import WorkerStop


def step(number, tokens):
    empty = np.zeros(0, np.int32).tobytes()
    return StepInput(step_id=number, num_decodes=0, rows=empty, start=empty, num_new=empty,
                     tokens=np.full(tokens, number, np.int32).tobytes(), block_table=empty, table_width=0,
                     sample_source=empty, sample_rows=empty, sample_output=empty)


LARGE = 32 * 1024  # bytes


@pytest.mark.parametrize("ring_bytes", [0, 3 * LARGE, 64 * LARGE])
def test_every_worker_gets_every_step_in_order(tmp_path, ring_bytes):
    endpoint = f"ipc://{tmp_path}/steps"
    ring = RingWriter(ring_bytes, 2) if ring_bytes else None
    sender = StepSender([endpoint], ring, far=True)
    near = [RingReader(os.dup(ring.fd), os.dup(ring.bells[i]), i) if ring else None for i in range(2)]
    receivers = [StepReceiver(endpoint, end) for end in (*near, None)]
    try:
        heard = 0
        while heard < 3:
            heard += sender.heard(5000)
        sizes = [1, LARGE, 3, LARGE // 4 + 1, LARGE, LARGE, 2]  # the ring of three overflows: the rest comes whole
        for number, size in enumerate(sizes):
            sender.send(step(number, size))
        sender.send(WorkerStop())
        for receiver in receivers:
            for number, size in enumerate(sizes):
                got = receiver.receive()
                assert got.step_id == number
                assert (got.array("tokens") == number).all()
                assert got.array("tokens").size == size
            assert isinstance(receiver.receive(), WorkerStop)
    finally:
        for receiver in receivers:
            receiver.close()
        sender.close()
