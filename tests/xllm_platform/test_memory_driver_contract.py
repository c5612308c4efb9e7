"""The contract of virtual memory drivers, run against every platform that can be used here."""

from __future__ import annotations

import pytest
from xllm_platform import registry
from xllm_platform.base import Platform

from tests.support import memory_driver_contract as contract

MIB = 2**20


@pytest.fixture(params=["cpu", "npu", "cuda"])
def plugin(request: pytest.FixtureRequest) -> Platform:
    available = registry.probe(request.param)
    if not available.ok:
        pytest.skip(available.reason)
    platform = registry.select(request.param)
    platform.set_device(0)
    if not platform.capabilities.virtual_memory:
        pytest.skip(f"platform {platform.name} has no virtual memory here")
    return platform


@pytest.mark.parametrize("check", [
    contract.check_two_addresses_show_one_page, contract.check_dtypes, contract.check_a_page_moves_between_addresses,
    contract.check_new_pages, contract.check_no_memory_left, contract.check_a_page_is_shared,
    contract.check_a_shared_page_outlives_its_exporter,
], ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(plugin: Platform, check) -> None:
    check(plugin)


@pytest.mark.parametrize("what", contract.WRONG)
def test_refusals(plugin: Platform, what: str) -> None:
    contract.check_refused(plugin, what)


def test_memory_comes_and_goes(plugin: Platform) -> None:
    if plugin.name == "cpu":  # what the machine has left is others' doing too: this process alone is looked at
        contract.check_memory_comes_and_goes(plugin, lambda: -contract.page_file_bytes(), 64 * MIB, 0)
    else:
        contract.check_memory_comes_and_goes(plugin, lambda: plugin.memory_info().free, 64 * MIB, 8 * MIB)
