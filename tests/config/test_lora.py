"""--lora-modules as vLLM takes it, and what adapters' settings must not say together."""

from __future__ import annotations

import json

import pytest

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import load_settings, settings_from_kwargs
from xllm_npu.config.lora import LoraModule
from xllm_npu.config.settings import Settings

A, B = LoraModule(name="a", path="/x/a"), LoraModule(name="b", path="/x/b=1", base_model_name="base")
B_JSON = json.dumps({"name": "b", "path": "/x/b=1", "base_model_name": "base"})


@pytest.mark.parametrize("words", [
    ["--lora-modules", "a=/x/a", B_JSON, "model"],
    ["model", "--lora_modules", "a=/x/a", "--lora_modules", B_JSON],
    ["model", f"--lora-modules={json.dumps([{'name': 'a', 'path': '/x/a'}, json.loads(B_JSON)])}"],
    ["--enable-lora", "model", "--lora-modules", "a=/x/a", B_JSON, "--max-loras", "2"],
])
def test_spellings(words):
    settings = load_settings(["--enable-lora", *words], {})
    assert settings.lora.lora_modules == (A, B)
    assert settings.model.model == "model"
    again = Settings.model_validate_json(settings.model_dump_json(exclude_unset=True))  # as engines get them
    assert again.lora == settings.lora


@pytest.mark.parametrize(("given", "message"), [
    ({"lora_modules": "a=/x"}, "needs --enable_lora"),
    ({"allow_runtime_lora_updating": True}, "needs --enable_lora"),
    ({"enable_lora": True, "lora_modules": ["a=/x", "a=/y"]}, "twice: a"),
    ({"enable_lora": True, "lora_modules": "a"}, "NAME=PATH"),
    ({"enable_lora": True, "lora_modules": '{"name": "a"}'}, "JSON object with name and path"),
    ({"enable_lora": True, "lora_modules": "{"}, "JSON"),
    ({"enable_lora": True, "lora_modules": "m=/x", "served_model_name": "m"}, "cannot have the model's name"),
    ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "less than --max_loras"),
    ({"enable_lora": True, "max_cpu_loras": 1, "lora_modules": ["a=/x", "b=/y"]}, "raise --max_cpu_loras"),
    ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank"),
])
def test_what_is_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        settings_from_kwargs(model="model", **given)


def test_how_many_are_loaded_at_most():
    def most(**given) -> int:
        return settings_from_kwargs(model="model", enable_lora=True, **given).lora.most_loaded

    assert (most(), most(max_loras=64), most(max_cpu_loras=3)) == (32, 64, 3)
