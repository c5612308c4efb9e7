"""Command line over environment over JSON file over default, and the provenance that says so."""

import itertools
import json
import pickle

import pytest
from pydantic import ValidationError

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load, load_settings, settings_from_kwargs, settings_sources
from xllm_npu.config.settings import Settings, served_model_names, setting_fields

CLI, ENV, JSON = "command line", "environment", "file"


@pytest.mark.parametrize("given", [set(c) for n in range(4) for c in itertools.combinations((CLI, ENV, JSON), n)])
@pytest.mark.parametrize("alias", [False, True])
def test_precedence_matrix(tmp_path, given, alias):
    name = "max_num_seqs" if alias else "max_seqs_per_batch"
    argv, environment = [], {}
    if CLI in given:
        argv += [f"--{name}=11"]
    if ENV in given:
        environment[f"XLLM_NPU_{name.upper()}"] = "12"
    if JSON in given:
        (tmp_path / "c.json").write_text(json.dumps({name: 13}))
        argv += ["--config_json_file", str(tmp_path / "c.json")]
    winner = next((kind for kind in (CLI, ENV, JSON) if kind in given), "default")
    loaded, _ = load(argv, environment)
    expected = {CLI: 11, ENV: 12, JSON: 13, "default": 1024}
    assert loaded.settings.scheduler.max_seqs_per_batch == expected[winner]
    assert loaded.sources["max_seqs_per_batch"].kind == winner


def test_sources_merge_within_one_section(tmp_path):
    (tmp_path / "c.json").write_text('{"scheduler": {"max_seqs_per_batch": 3, "max_tokens_per_chunk_for_prefill": 2}}')
    environment = {"XLLM_NPU_CONFIG_JSON_FILE": str(tmp_path / "c.json"), "XLLM_NPU_STARVE_THRESHOLD": "5"}
    scheduler = load_settings(["--max-tokens-per-batch", "7"], environment).scheduler
    assert (scheduler.max_seqs_per_batch, scheduler.max_tokens_per_chunk_for_prefill) == (3, 2)
    assert (scheduler.starve_threshold, scheduler.max_tokens_per_batch) == (5, 7)


def test_sources_name_what_stood_there(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"kv_cache": {"block-size": 16}}')
    sources = settings_sources(["M", "--no-enable-prefix-caching", f"--config-json-file={path}"],
                               {"XLLM_NPU_PORT": "1"})  # fmt: skip
    assert sources["model"] == (CLI, "MODEL")
    assert sources["enable_prefix_cache"] == (CLI, "--no-enable-prefix-caching")
    assert sources["port"] == (ENV, "XLLM_NPU_PORT")
    assert sources["block_size"] == (JSON, f"{path}: kv_cache.block-size")
    assert sources["host"].kind == "default"
    assert set(sources) == set(setting_fields())


def test_building_settings_reads_no_environment(monkeypatch):
    monkeypatch.setenv("XLLM_NPU_PORT", "1234")
    monkeypatch.setenv("MODEL", '{"model": "other"}')
    assert Settings().service.port == 8000
    assert Settings().model.model == "smollm2"
    assert load_settings([]).service.port == 1234


def test_settings_are_frozen_and_survive_a_pickle():
    settings = load_settings(["--port", "9", "--api-key", "k"], {})
    with pytest.raises(ValidationError):
        settings.service.port = 3
    with pytest.raises(ValidationError):
        settings.service = Settings().service
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert copy.service.api_key == ("k",)
    assert type(settings) is Settings


def test_keyword_arguments_win_over_environment():
    environment = {"XLLM_NPU_BLOCK_SIZE": "16", "XLLM_NPU_PORT": "5"}
    settings = settings_from_kwargs(model="m", max_num_seqs=3, block_size=32, dtype=None, environment=environment)
    assert settings.model.model == "m"
    assert settings.scheduler.max_seqs_per_batch == 3
    assert (settings.kv_cache.block_size, settings.service.port, settings.model.dtype) == (32, 5, "auto")
    with pytest.raises(SettingsError, match=r"no setting max_model_length\. Did you mean max_model_len"):
        settings_from_kwargs(max_model_length=3, environment={})


def test_given_values_build_equal_settings(tmp_path):
    (tmp_path / "c.json").write_text('{"max_cache_size": "1MiB", "graph_batch_sizes": [4, 1]}')
    argv = ["m", "--config-json-file", str(tmp_path / "c.json"), "--enforce-eager", "--api-key=a,b"]
    loaded, _ = load(argv, {})
    again = settings_from_kwargs(**loaded.given(), environment={})
    assert again.model_dump(exclude={"files"}) == loaded.settings.model_dump(exclude={"files"})
    assert again.service.api_key == ("a", "b")


def test_reference_defaults():
    s = Settings()
    assert (s.kv_cache.block_size, s.kv_cache.max_memory_utilization, s.kv_cache.xxh3_128bits_seed) == (128, 0.8, 1024)
    assert (s.scheduler.max_tokens_per_batch, s.scheduler.max_seqs_per_batch) == (10240, 1024)
    assert s.scheduler.prefill_scheduling_memory_usage_threshold == 0.95
    assert (s.scheduler.scheduling_policy, s.scheduler.priority_strategy) == ("decode_first", "fcfs")
    assert (s.execution.enable_graph, s.execution.max_tokens_for_graph_mode) == (False, 2048)
    assert (s.service.host, s.service.port, s.service.max_concurrent_requests) == ("127.0.0.1", 8000, 200)


def test_served_names(tmp_path):
    (tmp_path / "qwen").mkdir()
    assert served_model_names(load_settings([str(tmp_path / "qwen")], {})) == ("qwen",)
    assert served_model_names(load_settings(["Qwen/Qwen3-8B"], {})) == ("Qwen/Qwen3-8B",)
    assert served_model_names(load_settings(["m", "--model-id", "x"], {})) == ("x",)
    assert served_model_names(load_settings(["m", "--model-id", "x", "--served-model-name", "a,b"], {})) == ("a", "b")


def test_json_form_gives_equal_settings_but_no_secrets():
    settings = load_settings(["m", "--graph-batch-sizes=1,2", "--max-model-len=9", "--api-key=sk-hidden"], {})
    copy = Settings.model_validate_json(settings.model_dump_json())
    assert copy.model_dump() == settings.model_dump()
    assert "sk-hidden" not in copy.service.api_key
