"""What comes with a model becomes its tokenizer, its template and the formats that it writes."""

import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.service.fake_master import INFO
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.llm_master import LLMMaster
from xllm_npu.master.model_text import load_text


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with one special token, and a template without tools."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    path = tmp_path_factory.mktemp("text")
    backend.save(str(path / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(body))
    return path


@pytest.mark.parametrize(("settings", "architecture", "calls", "reasoning"), [
    ({}, "LlamaForCausalLM", "json", None),
    ({}, "GptOssForCausalLM", "gpt_oss", "gpt_oss"),
    ({"chat_template": "<tool_call>{{ messages }}</think>"}, "Qwen3ForCausalLM", "hermes", "qwen3"),
    ({"tool_call_parser": "glm45", "reasoning_parser": "none"}, "Qwen3ForCausalLM", "glm45", None),
    ({"tool_call_parser": "none", "reasoning_parser": "deepseek-r1"}, "Qwen3ForCausalLM", None, "deepseek_r1"),
])
def test_the_formats_of_a_model(directory: Path, settings: dict, architecture: str, calls: str, reasoning: str) -> None:
    ready = msgspec.structs.replace(INFO, architecture=architecture, tokenizer_dir=str(directory))
    tokenizer, template, chosen = load_text(settings_from_kwargs(model="m", **settings), ready)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert template
    assert (chosen.name_of_tools, chosen.name_of_reasoning) == (calls, reasoning)
    assert chosen.marker_ids == tokenizer.added_tokens
    assert set(chosen.marker_ids) == {"<end>", "<tool_call>"}


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_a_wrong_name_is_refused_before_anything_starts(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag} has no format 'hermse'.*auto"):
        LLMMaster(settings_from_kwargs(model="m", **{flag: "hermse"}))
