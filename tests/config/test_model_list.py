"""Several models: what each is set to, and what they must not have in common."""

import json

import pytest

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import Loaded, load, load_settings, settings_from_kwargs
from xllm_npu.config.model_list import share_a_device
from xllm_npu.config.report import as_json, non_default_values, table
from xllm_npu.config.settings import Settings, served_model_names

SIZE = "--max-cache-size=1GiB"


def load_all(*argv: str) -> Loaded:
    return load(argv, {}, several_models=True)[0]


def load_file(tmp_path, document: object, *argv: str) -> Loaded:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    return load_all("--config-json-file", str(path), *argv)


def names(loaded: Loaded) -> list[tuple[str, tuple[str, ...]]]:
    return [(settings.model.model, served_model_names(settings)) for settings in loaded.models]


@pytest.mark.parametrize(
    "words", ["a b", "--model a --model b", "--model=a --model=b", "--model_path a --model_path b"]
)
def test_models_are_named_by_repeating(words):
    loaded = load_all(*words.split(), SIZE, "--port", "7")
    assert names(loaded) == [("a", ("a",)), ("b", ("b",))]
    assert {(settings.kv_cache.max_cache_size, settings.service.port) for settings in loaded.models} == {(2**30, 7)}


def test_one_model_is_what_it_was(tmp_path):
    assert names(load_all("a")) == [("a", ("a",))]
    assert names(load_all("a", "--served-model-name", "x,y")) == [("a", ("x", "y"))]
    assert names(load_file(tmp_path, {"models": [{"model": "a", "served_model_name": ["x", "y"]}]})) == [
        ("a", ("x", "y"))]
    assert names(load_file(tmp_path, {"models": ["a"]}, "--served-model-name", "x,y")) == [("a", ("x", "y"))]


def test_names_for_all_are_one_each():
    assert names(load_all("a", "b", SIZE, "--served-model-name", "x,y")) == [("a", ("x",)), ("b", ("y",))]


def test_an_entry_wins_over_what_is_set_for_all(tmp_path):
    document = {
        "models": ["a", {"model": "b", "served_model_name": "x", "block_size": 16,
                         "kv_cache": {"max-cache-size": "2MiB"}}],
        "block_size": 32, "max_cache_size": "1MiB", "enable_graph": True,
    }  # fmt: skip
    loaded = load_file(tmp_path, document, "--block-size", "64")
    assert names(loaded) == [("a", ("a",)), ("b", ("x",))]
    assert [(s.kv_cache.block_size, s.kv_cache.max_cache_size, s.execution.enable_graph) for s in loaded.models] == [
        (64, 2**20, True), (16, 2**21, True)]


@pytest.mark.parametrize(
    ("document", "words", "said"),
    [
        ({}, "a a", "Two models would be called a: give each"),
        ({}, "a b", "The model a shares its device with another, so its KV cache needs a size: set --max-cache-size"),
        ({}, "a b --platform cpu", "needs a size"),
        ({}, "a b --enable-vmm-weights --vmm-elastic", "needs a size"),
        ({}, "a b --served-model-name x", "--served-model-name gives 1 names to 2 models: it takes one for each"),
        ({}, "a b --served-model-name x,x", "Two models would be called x"),
        ({}, "a b --model-id x", "Two models would be called x"),
        ({}, "a b --nnodes 2 --tp-size 2", "Several models are for one machine in this version"),
        ({}, "a --model b", "MODEL and --model set the same thing differently"),
        ({"models": []}, "", "models takes a list with an object for each model"),
        ({"models": {"a": 1}}, "", "models takes a list with an object for each model"),
        ({"models": ["a", 3]}, "", 'models[1] takes an object such as {"model": "smollm2"}'),
        ({"models": ["a", {"block_size": 16}]}, "", 'models[1] needs a "model"'),
        ({"models": ["a", {}]}, "", 'models[1] needs a "model"'),
        ({"models": ["a", {"model": "b", "port": 3}]}, "", "models[1].port is set for all models together"),
        ({"models": ["a", {"model": "b", "blok_size": 3}]}, "", "models[1].blok_size is no setting. Did you mean"),
        ({"models": ["a", {"model": "b", "block_size": 0}]}, "", "models[1].block_size=0 is out of range"),
        ({"models": ["a", {"model": "b", "served_model_name": ["u", "a"]}]}, SIZE, "Two models would be called a"),
        ({"models": ["a"]}, "b", "MODEL and {path}: models both say what to serve"),
        ({"models": ["a"], "model": "b"}, "", "{path}: model and {path}: models both say what to serve"),
        ({}, "a --auto-wakeup", "--auto-wakeup needs a model that can sleep: set --enable-vmm-weights"),
        ({}, f"a b {SIZE} --evict-idle-models", "--evict-idle-models needs a model that can sleep"),
        ({}, "a --wakeup-timeout 3", "--wakeup-timeout has no meaning without --auto-wakeup"),
        ({}, "a --admin-host ::1", "--admin-host has no meaning without --admin-port"),
        ({}, "a --port 5 --admin-port 5", "--admin-port=5 is the port of the API too"),
    ],
)
def test_what_cannot_be_served_together(tmp_path, document, words, said):
    with pytest.raises(SettingsError) as caught:
        load_file(tmp_path, document, *words.split())
    assert said.replace("{path}", str(tmp_path / "c.json")) in str(caught.value)


@pytest.mark.parametrize("words", ["--enable-vmm-kvcache --vmm-elastic", SIZE])
def test_what_makes_a_shared_device_enough(words):
    assert len(load_all("a", "b", *words.split()).models) == 2


def test_models_on_devices_of_their_own_need_no_size(tmp_path):
    document = {"platform": "npu", "models": [{"model": "a", "tp_size": 2}, {"model": "b", "device_id": 2}]}
    first, second = load_file(tmp_path, document).models
    assert not share_a_device(first, second)
    document["models"][1]["device_id"] = 1
    with pytest.raises(SettingsError, match="needs a size"):
        load_file(tmp_path, document)


def test_only_a_server_takes_several(tmp_path):
    for words in (["a", "b"], ["--model", "a", "--model", "b"]):
        with pytest.raises(SettingsError, match="is enough, got a and b: only a server takes several"):
            load_settings([*words, SIZE], {})
    (tmp_path / "c.json").write_text(json.dumps({"models": ["a", "b"], "max_cache_size": 1}))
    for call in (lambda path: load_settings(["--config-json-file", path], {}),
                 lambda path: settings_from_kwargs(config_json_file=path, environment={})):
        with pytest.raises(SettingsError, match="models has 2 entries, and only a server takes several"):
            call(str(tmp_path / "c.json"))


def test_reports_show_all_and_what_is_written_gives_the_same_again(tmp_path):
    loaded = load_file(tmp_path, {"models": ["a", {"model": "b", "served_model_name": ["x"], "max_model_len": 512}],
                                  "max_cache_size": "1MiB"}, "--block-size", "64")
    assert "models" in table(loaded)
    assert [line for line in table(loaded).splitlines() if line.startswith("  model ") and "," in line] == [
        "  model a, max_model_len -, served_model_name -", "  model b, max_model_len 512, served_model_name x"]
    assert [row["model"] for row in json.loads(as_json(loaded))["models"]] == ["a", "b"]
    written = non_default_values(loaded.models)
    assert "model" not in written
    again = load_file(tmp_path, written)
    assert again.models == loaded.models
    assert "models" not in json.loads(as_json(load_all("a")))
    assert non_default_values([Settings()]) == {}
