"""The settings of virtual memory: defaults, and what they require of each other."""

from __future__ import annotations

import json

import pytest

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load_settings, settings_from_kwargs


def problems(**values) -> str:
    with pytest.raises(SettingsError) as caught:
        settings_from_kwargs(model="m", **values)
    return str(caught.value)


def test_rule_2_both_flags_are_off_unless_set():
    kv = settings_from_kwargs(model="m").kv_cache
    assert (kv.enable_vmm_kvcache, kv.enable_vmm_weights, kv.vmm_elastic, kv.vmm_memory_reserve_bytes) == (
        False, False, False, 0)
    kv = settings_from_kwargs(model="m", enable_vmm_kvcache=True).kv_cache
    assert (kv.enable_vmm_kvcache, kv.vmm_elastic) == (True, False)
    kv = settings_from_kwargs(model="m", enable_vmm_weights=True, vmm_elastic=True).kv_cache
    assert (kv.enable_vmm_weights, kv.enable_vmm_kvcache) == (True, False)


def test_rule_10_weights_alone_need_elastic_memory():
    assert "needs --vmm-elastic, or --enable-vmm-kvcache beside it" in problems(enable_vmm_weights=True)
    assert settings_from_kwargs(model="m", enable_vmm_weights=True, enable_vmm_kvcache=True)
    assert settings_from_kwargs(model="m", enable_vmm_weights=True, vmm_elastic=True)


def test_rule_9_there_is_no_other_backend_than_that_of_language_models():
    assert "is not available in this version" in problems(enable_vmm_weights=True, vmm_elastic=True, backend="dit")


def test_what_users_of_vllm_ask_for_to_sleep():
    kv = load_settings(["m", "--enable-sleep-mode"]).kv_cache
    assert (kv.enable_vmm_weights, kv.enable_vmm_kvcache, kv.vmm_elastic) == (True, True, False)
    kv = load_settings(["m", "--enable-sleep-mode", "--vmm-elastic"]).kv_cache
    assert (kv.enable_vmm_weights, kv.enable_vmm_kvcache, kv.vmm_elastic) == (True, True, True)
    assert not settings_from_kwargs(model="m", enable_sleep_mode=False).kv_cache.enable_vmm_weights


def test_rule_14_flags_override_json(tmp_path):
    file = tmp_path / "server.json"
    file.write_text(json.dumps({"enable_vmm_kvcache": True, "vmm_elastic": True, "vmm_memory_reserve_bytes": "1GiB"}))
    kv = load_settings(["m", "--config-json-file", str(file), "--vmm-memory-reserve-bytes", "2GiB"]).kv_cache
    assert (kv.vmm_elastic, kv.vmm_memory_reserve_bytes) == (True, 2 * 2**30)


@pytest.mark.parametrize(("values", "words"), [
    ({"vmm_elastic": True}, "no meaning without --enable-vmm-kvcache or --enable-vmm-weights"),
    ({"enable_vmm_weights": True, "vmm_elastic": True, "tp_size": 2, "ep_size": 2, "enable_eplb": True},
     "--enable-eplb moves them"),
    ({"enable_vmm_kvcache": True, "vmm_memory_reserve_bytes": 4096}, "no meaning without --vmm-elastic"),
    ({"max_memory_utilization": 0}, "a cache of fixed size needs a share above 0"),
    ({"enable_vmm_kvcache": True, "max_memory_utilization": 0}, "a cache of fixed size needs a share above 0"),
    ({"enable_vmm_kvcache": True, "phy_page_granularity_size": 16}, "is out of range"),
])
def test_rules_between_settings(values, words):
    assert words in problems(**values)


def test_rule_26_a_ratio_of_0_is_no_ceiling_for_an_elastic_cache():
    kv = settings_from_kwargs(
        model="m", enable_vmm_kvcache=True, vmm_elastic=True, max_memory_utilization=0).kv_cache
    assert kv.max_memory_utilization == 0
