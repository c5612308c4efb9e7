"""Only `make test-npu` runs what is here: elsewhere it is not even imported. There, a skipped test is a failed one."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

IN_LAB = os.environ.get("NPU_LAB") == "1"
collect_ignore_glob = [] if IN_LAB else ["test_*.py", "kernels/test_*.py"]
if IN_LAB:
    import torch  # loads torch_npu, and with it the emulator, before a test imports parts of that


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, pytest.TestReport,
                                                                                      pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: {call.excinfo and call.excinfo.value}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport,
                                                                         pytest.CollectReport]:
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} was skipped: {report.longrepr}"
    return report


@pytest.fixture
def device():
    torch.npu.set_device(0)
    return torch.device("npu", 0)


@pytest.fixture
def abandoned():
    """For tests that leave graphs waiting for ever."""
    from npu_emulator import fake_cann

    yield
    fake_cann.abandon_graphs()
