"""What machines must have in common, and what is their own."""

import json

import pytest

from xllm_npu.config.settings import Settings
from xllm_npu.execution.device_probe import DeviceReport, ProbeError, probe
from xllm_npu.master.cluster.identity import identify, mismatch, model_fingerprint

CARDS = DeviceReport(platform="npu", count=8, shared=False)


def settings(**sections) -> Settings:
    return Settings(**sections)


def test_equal_settings_fit():
    own = {"num_threads": 3, "device_id": 2}
    here = identify(settings(), CARDS)
    there = identify(settings(execution=own, model={"download_dir": "/elsewhere"}, service={"port": 9}), CARDS)
    assert mismatch(here, there, 1) is None
    assert there.devices == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model", "dtype", "float32"), ("kv_cache", "block_size", 32), ("parallel", "tp_size", 4),
        ("scheduler", "max_seqs_per_batch", 7), ("execution", "enable_graph", True), ("model", "max_model_len", 9),
    ],
)
def test_every_setting_that_matters_is_compared(section, name, value):
    said = mismatch(identify(settings(), CARDS), identify(settings(**{section: {name: value}}), CARDS), 3)
    assert said is not None
    assert said.startswith(f"node 3 has --{name.replace('_', '-')}={value} and node 0 has")


def test_the_same_model_in_another_directory(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    (tmp_path / "a/config.json").write_text(json.dumps({"x": 1, "y": 2}))
    (tmp_path / "b/config.json").write_text(json.dumps({"y": 2, "x": 1}, indent=3))
    (tmp_path / "c/config.json").write_text(json.dumps({"x": 1, "y": 3}))
    a, b, c = (model_fingerprint(settings(model={"model": str(tmp_path / name)})) for name in "abc")
    assert a == b != c


def test_files_and_hub_ids(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "n.gguf").write_bytes(b"GGUF" + bytes(101))
    m, n = (model_fingerprint(settings(model={"model": str(tmp_path / name)})) for name in ("m.gguf", "n.gguf"))
    assert m != n
    assert model_fingerprint(settings(model={"model": "org/name", "revision": "v2"})) == "org/name@v2"


def test_devices_are_asked_in_a_process_of_their_own():
    assert probe("cpu") == DeviceReport(platform="cpu", count=1, shared=True)
    with pytest.raises(ProbeError, match="There is no platform 'tpu'"):
        probe("tpu")
