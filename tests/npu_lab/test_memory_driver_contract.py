"""The contract of virtual memory drivers, run for the NPU plugin over the fake CANN."""

from __future__ import annotations

import pytest
from xllm_platform import registry
from xllm_platform.base import Platform

from tests.support import memory_driver_contract as contract

pytestmark = pytest.mark.npu_lab


@pytest.fixture
def plugin() -> Platform:
    platform = registry.select("npu")
    platform.set_device(0)
    return platform


@pytest.mark.parametrize("check", [
    contract.check_two_addresses_show_one_page, contract.check_dtypes, contract.check_a_page_moves_between_addresses,
    contract.check_new_pages, contract.check_no_memory_left, contract.check_a_page_is_shared,
    pytest.param(contract.check_a_shared_page_outlives_its_exporter, marks=pytest.mark.slow),
], ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(plugin: Platform, check) -> None:
    check(plugin)


@pytest.mark.parametrize("what", contract.WRONG)
def test_refusals(plugin: Platform, what: str) -> None:
    contract.check_refused(plugin, what)


def test_memory_comes_and_goes(plugin: Platform) -> None:
    size = 4 * plugin.virtual_memory().granularity
    contract.check_memory_comes_and_goes(plugin, lambda: plugin.memory_info().free, size, 0)
