"""Every fixture of canitoolcall, model outputs of many families with the one right parse of each, in many cuttings.

Content and reasoning must be right to the last blank, arguments as JSON values; an output that was cut short makes no
call.
"""

import json
import random
from functools import cache
from importlib import resources

import pytest

from xllm_npu.text.output_events import Content, Reasoning, ToolCall
from xllm_npu.text.output_format import ModelHints, output_format
from xllm_npu.text.tool_spec import ToolSpec

# Family and what models[0] begins with: the formats of calls and of reasoning.
FORMATS = [
    ("qwen3-hermes", "", "hermes", "qwen3"),
    ("qwen3-xml", "", "qwen3_coder", "qwen3"),
    ("deepseek", "deepseek-ai/DeepSeek-V3-", "deepseek_v3", "deepseek_r1"),
    ("deepseek", "deepseek-ai/DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
    ("deepseek", "deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "deepseek_v3"),
    ("deepseek", "deepseek-ai/DeepSeek-V4-", "deepseek_v4", "deepseek_v3"),
    ("deepseek", "deepseek-ai/DeepSeek-V4.1", "deepseek_v41", "deepseek_v3"),
    ("gemma4", "", "gemma4", "gemma4"),
    ("glm", "zai-org/GLM-4.5", "glm45", "glm45"),
    ("glm", "", "glm47", "glm45"),
    ("gpt-oss", "", "openai", "openai_gptoss"),
    ("kimi", "moonshotai/Kimi-K2", "kimi_k2", "kimi_k2"),
    ("kimi", "moonshotai/Kimi-K3", "kimi_k3", "kimi_k3"),
    ("llama", "meta-llama/Llama-3", "llama3_json", None),
    ("llama", "meta-llama/Llama-4", "llama4_pythonic", None),
    ("mistral", "", "mistral", "mistral"),
]

# Here, white space around content does not count.
SOFT = {"gemma4/vllm-text-before-call": "gemma4/sglang-text-before-call keeps the blank before a call that this drops"}


@cache
def families():
    root = resources.files("canitoolcall") / "_data" / "fixtures"
    found = {}
    for folder in sorted((f for f in root.iterdir() if f.is_dir()), key=lambda f: f.name):
        files = [f for f in folder.iterdir() if f.name.endswith(".jsonl")]
        lines = [line for f in sorted(files, key=lambda f: f.name) for line in f.read_text("utf-8").splitlines()]
        found[folder.name] = (json.loads((folder / "family.json").read_text("utf-8")), list(map(json.loads, lines)))
    return found


def fixtures():
    return [pytest.param(one, id=one["id"]) for _, all_ in families().values() for one in all_]


def test_all_are_here():
    assert len(fixtures()) == 469
    assert set(SOFT) <= {one["id"] for _, all_ in families().values() for one in all_}


def prompt_of(fixture):
    if fixture.get("generation_prompt") is not None:
        return fixture["generation_prompt"]
    models = families()[fixture["family"]][0]["reference_models"]
    return next(m["default_generation_prompt"] for m in models if m["repo"] == fixture["models"][0])


def format_of(fixture):
    calls, reasoning = next((c, r) for family, model, c, r in FORMATS
                            if fixture["family"] == family and fixture["models"][0].startswith(model))
    return output_format(calls, reasoning, ModelHints())


def parser_of(fixture):
    tools = [ToolSpec(t["function"]["name"], t["function"].get("parameters") or {}) for t in fixture["tools"]]
    return format_of(fixture).parser(tools, prompt_of(fixture))


def parsed(fixture, pieces):
    """Content, reasoning and calls."""
    parser = parser_of(fixture)
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish("truncated" in fixture["tags"])
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert parser.num_tool_calls == len(calls)
    return ("".join(e.text for e in events if isinstance(e, Content)),
            "".join(e.text for e in events if isinstance(e, Reasoning)),
            [(call.name, call.arguments, call.id) for call in calls])


def cuttings(fixture):
    """The text at markers, in pieces like tokens of several sizes, and character by character."""
    text = fixture["raw_output"]
    markers = families()[fixture["family"]][0]["markers"]
    cuts = sorted({i for m in markers for at in range(len(text)) if text.startswith(m, at) for i in (at, at + len(m))})
    yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    for seed, longest in ((1, 3), (2, 8), (3, 40)):
        generator, at, pieces = random.Random(seed), 0, []
        while at < len(text):
            size = generator.randint(1, longest)
            pieces.append(text[at : at + size])
            at += size
        yield pieces
    yield list(text)


@pytest.mark.parametrize("fixture", fixtures())
def test_the_fixture(fixture):
    text = fixture["raw_output"]
    whole = parsed(fixture, [text])
    for pieces in cuttings(fixture):
        assert parsed(fixture, pieces) == whole
    problem = problem_of(fixture, whole)
    assert problem is None, problem


def problem_of(fixture, result):
    content, reasoning, calls = result
    expected = fixture.get("expected")
    if expected is None:
        accepted = fixture["expected_error"]["accept"]
        right = not calls and ("no_tool_calls" in accepted or content.strip() == fixture["raw_output"].strip())
        return None if right else f"accepts {accepted}, got {result}"
    if fixture["id"] in SOFT:
        content = content.strip()
    wanted = (expected["content"] or "", expected["reasoning_content"] or "",
              [(call["name"], call["arguments"]) for call in expected["tool_calls"]])
    got = (content, reasoning, [(name, json.loads(arguments)) for name, arguments, _ in calls])
    equal = json.dumps(got, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # in Python 1 == True
    return None if equal else f"expected {wanted}, got {got}"
