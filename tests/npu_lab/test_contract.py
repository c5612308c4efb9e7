"""The platform contract, run for the NPU plugin: here nothing of it is skipped."""

from __future__ import annotations

import pytest
from xllm_platform import registry
from xllm_platform.base import Platform

from tests.xllm_platform import test_contract as contract

pytestmark = pytest.mark.npu_lab
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture
def plugin() -> Platform:
    platform = registry.select("npu")
    platform.set_device(0)
    return platform
