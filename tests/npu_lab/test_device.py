"""torch_npu's transfers, allocator, streams and events over the fake CANN, which counts what crosses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from npu_emulator import fake_cann

pytestmark = pytest.mark.npu_lab
MIB = 1 << 20


def test_transfers_take_the_real_path_and_are_counted(device: torch.device) -> None:
    before = fake_cann.counters()
    y = torch.arange(1024.0).to(device).cpu()
    crossed = fake_cann.counters().since(before)
    assert y[-1] == 1023
    assert (crossed["h2d_bytes"], crossed["d2h_bytes"]) == (4096, 4096)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.t().cpu(), lambda x: x.to("cpu", torch.float16), lambda x: x.sum().item(), lambda x: x[0].tolist(),
     lambda x: x[:, ::2].cpu()],
    ids=["transposed", "cast", "item", "tolist", "strided"])
def test_no_copy_to_the_host_escapes_the_count(device: torch.device, read) -> None:
    x = torch.arange(12.0).view(3, 4).to(device)
    before = fake_cann.counters()
    read(x)
    assert fake_cann.counters().since(before)["d2h_calls"] == 1


def test_copies_with_casts_and_strides(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4)
    on_device = x.to(device)
    assert torch.equal(on_device.t().cpu(), x.t())
    assert torch.equal(on_device.to(torch.int32).cpu(), x.to(torch.int32))
    assert torch.equal(on_device.to("cpu", torch.float16), x.half())
    target = torch.zeros(4, 3, device=device)
    target.t().copy_(x.double())
    assert torch.equal(target.cpu(), x.t())
    target[:, 1] = torch.tensor([7, 8, 9, 10])
    assert target[:, 1].tolist() == [7, 8, 9, 10]


def test_an_operator_without_a_reference_is_refused(device: torch.device) -> None:
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(RuntimeError):
        torch.ops.npu.npu_geglu(x, -1, 1)


def test_allocator_and_out_of_memory(device: torch.device) -> None:
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert torch.npu.memory_allocated() >= 64 * MIB
    assert torch.npu.mem_get_info()[0] <= free - 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=device)
    del block
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] >= free - 8 * MIB


def test_events_measure_and_streams_wait(device: torch.device) -> None:
    side = torch.npu.Stream()
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(side):
        begin.record()
        x = torch.ones(8, device=device) + 1
        end.record()
    torch.npu.current_stream().wait_stream(side)
    end.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert x.eq(2).all()


@pytest.mark.slow
def test_configure_process_is_in_time_for_the_allocator() -> None:
    """Expandable segments are what the caching allocator maps physical pages into."""
    code = """
import torch
from xllm_platform.registry import select
platform = select("npu")
platform.configure_process()
platform.set_device(0)
block = torch.empty(32 << 20, dtype=torch.uint8, device=platform.device())
from npu_emulator import fake_cann
print(fake_cann.counters().mappings_live)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_NPU_ALLOC_CONF"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
