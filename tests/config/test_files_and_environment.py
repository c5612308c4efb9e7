"""The JSON file, the environment, the file that is written, and the launch files of this repository."""

import json
from pathlib import Path

import pytest

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load, load_settings
from xllm_npu.config.report import as_json, dump_if_asked, non_default_values, table
from xllm_npu.config.settings import Settings, setting_fields

CONFIGS = Path(__file__).parents[2] / "configs"


def load_file(tmp_path, text, *argv):
    path = tmp_path / "c.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return load_settings(["--config-json-file", str(path), *argv], {})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_launch_files_are_accepted_and_say_only_what_matters(path):
    loaded, _ = load(["--config_json_file", str(path)], {})
    for name, value in json.loads(path.read_text()).items():
        assert loaded.sources[name].kind == "file"
        default = setting_fields()[name].info.default
        assert value != default or name in ("model", "platform"), f"{name} is at its default"


def test_there_are_launch_files():
    assert {"cpu_demo", "npu_single", "gpu_fallback"} <= {path.stem for path in CONFIGS.glob("*.json")}


def test_model_is_a_key_and_a_section(tmp_path):
    assert load_file(tmp_path, {"model": "m"}).model.model == "m"
    settings = load_file(tmp_path, {"model": {"model": "m", "dtype": "fp32"}, "port": 4})
    assert (settings.model.model, settings.model.dtype, settings.service.port) == ("m", "float32", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"prot": 1}, "c.json: prot is no setting. Did you mean port?"),
        ({"service": {"prot": 1}}, "c.json: service.prot is no setting. Did you mean port?"),
        ({"scheduler": {"port": 1}}, "scheduler.port belongs into service"),
        ({"port": True}, "port takes a number, got true"),
        ({"port": 70000}, "c.json: port=70000 is out of range"),
        ({"port": {"a": 1}}, "takes a single value"),
        ({"enable_graph": None}, "enable_graph=none takes true or false"),
        ({"enable_disagg_pd": True}, "enable_disagg_pd is not available in this version"),
        ({"max_num_seqs": 1, "max_seqs_per_batch": 2}, "set the same thing differently"),
        ({"config_json_file": "x"}, "cannot be set in a configuration file"),
        ('{"port": 1, "port": 2}', "port stands there twice"),
        ('{"port": 1,}', "is not JSON"),
        ("[1]", "must hold a JSON object"),
    ],
)
def test_what_a_file_may_not_hold(tmp_path, text, said):
    with pytest.raises(SettingsError) as caught:
        load_file(tmp_path, text)
    assert said in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere.json cannot be read: No such file"):
        load_settings(["--config-json-file", str(tmp_path / "nowhere.json")], {})


def test_unknown_environment_variable_is_refused_with_the_nearest():
    with pytest.raises(SettingsError, match=r"XLLM_NPU_BLOK_SIZE\. Did you mean XLLM_NPU_BLOCK_SIZE\?"):
        load_settings([], {"XLLM_NPU_BLOK_SIZE": "1"})


def test_environment_values():
    environment = {"XLLM_NPU_ENABLE_GRAPH": "true", "XLLM_NPU_PORT": "", "OTHER": "x", "XLLM_NPU_API_KEY": "a,b"}
    settings = load_settings([], environment)
    assert (settings.execution.enable_graph, settings.service.port) == (True, 8000)
    assert settings.service.api_key == ("a", "b")
    with pytest.raises(SettingsError, match="XLLM_NPU_PORT=x takes a whole number"):
        load_settings([], {"XLLM_NPU_PORT": "x"})


def test_addresses_that_kubernetes_puts_into_a_pod_are_not_ours():
    environment = {
        "XLLM_NPU_PORT": "tcp://10.0.0.1:80", "XLLM_NPU_SERVICE_HOST": "10.0.0.1", "XLLM_NPU_SERVICE_PORT": "80",
        "XLLM_NPU_SERVICE_PORT_HTTP": "80", "XLLM_NPU_PORT_80_TCP": "tcp://10.0.0.1:80",
        "XLLM_NPU_PORT_80_TCP_PROTO": "tcp", "XLLM_NPU_ROUTER_PORT": "tcp://10.0.0.2:80",
    }  # fmt: skip
    assert load_settings([], environment) == Settings()


def test_table_and_json_show_every_value_masked(tmp_path):
    loaded, _ = load(["--api-key=sk-hidden", "--max-num-seqs", "5"], {"XLLM_NPU_PORT": "1"})
    text, rows = table(loaded), json.loads(as_json(loaded))
    assert "sk-hidden" not in text + json.dumps(rows)
    assert set(rows) == set(setting_fields())
    assert all(f"  {name} " in text for name in setting_fields())
    row = {"section": "scheduler", "value": 5, "source": "command line", "given_as": "--max-num-seqs"}
    assert rows["max_seqs_per_batch"] == row
    assert "environment (XLLM_NPU_PORT)" in text


def test_written_file_holds_what_is_not_default_and_gives_the_same_settings(tmp_path):
    path = tmp_path / "out.json"
    argv = ["m", "--max-cache-size=1GiB", "--port", "8000", "--api-key", "sk-hidden", "--graph-batch-sizes=1,2"]
    settings = load_settings([*argv, "--enable_dump_config_json", f"--dump-config-json-file={path}"], {})
    assert dump_if_asked([settings]) == path
    assert json.loads(path.read_text()) == {"model": "m", "max_cache_size": 2**30, "graph_batch_sizes": [1, 2]}
    again = load_settings(["--config-json-file", str(path)], {})
    assert non_default_values([again]) == non_default_values([settings])


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dump_if_asked([load_settings(["m"], {})]) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingsError, match="cannot be written"):
        dump_if_asked([load_settings(["--enable-dump-config-json", "--dump-config-json-file=/nowhere/x"], {})])
