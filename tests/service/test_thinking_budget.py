"""`thinking_token_budget` and Anthropic's `thinking.budget_tokens`: the grammar that the engine is held to."""

import pytest
from msgspec import structs

from tests.service.fake_master import INFO, accepts, says
from tests.service.test_forced_calls import CALL, FORMAT, JSON, MESSAGES, NAMED, OTHER, TIME, URL, WEATHER
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.output_format import ModelHints, output_format

SHORT, LONG = "<think>\nHm.\n</think>\n\n", "<think>\nHm, let me see.\n</think>\n\n"
BUDGET = 13  # of a vocabulary of bytes, to which the closing tag is text and counts
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
BAD_CALL = CALL.replace('{"city": "Paris"}', '{"town": 3}')


@pytest.fixture(autouse=True)
def formats(master):
    master.output_format = output_format("hermes", "qwen3", ModelHints())


TOOLS = {"tools": [WEATHER, TIME]}
ASKED = [
    ({}, ["Hello", "", CALL, BAD_CALL], []),
    (TOOLS, ["Hello", CALL, "Well.\n" + BAD_CALL], []),
    ({"tools": [STRICT, TIME]}, ["Hello", CALL, "Well.\n" + CALL + "\n" + OTHER], [BAD_CALL, "Well.\n" + BAD_CALL]),
    ({"tools": [STRICT, TIME], "parallel_tool_calls": False}, ["Hello", CALL], [CALL + "\n" + OTHER]),
    ({"response_format": FORMAT}, [JSON], ["Hello", CALL]),
    ({"response_format": FORMAT, **TOOLS}, [JSON, CALL], ["Hello"]),
    ({"tool_choice": "required", **TOOLS}, [CALL, CALL + "\n" + OTHER], ["Hello", JSON]),
    ({"tool_choice": NAMED, **TOOLS}, [OTHER], [CALL, "Hello"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
@pytest.mark.parametrize("begun", [False, True])
async def test_the_grammar(client, master, fields, good, bad, begun):
    master.script = says("x")
    master.prompt_end = "<think>\n" if begun else ""
    short, long = (t.removeprefix("<think>\n") if begun else t for t in (SHORT, LONG))
    response = await client.post(URL, json={"messages": MESSAGES, "thinking_token_budget": BUDGET, **fields})
    assert response.status_code == 200, response.text
    grammar = master.requests[-1].params.grammar
    assert master.grammars.checked[-1][0] == grammar
    assert [text for text in good if not accepts(grammar, short + text)] == []
    assert [text for text in bad if accepts(grammar, short + text)] == []
    assert [text for text in good if accepts(grammar, long + text)] == []
    if not begun:
        assert [text for text in good if not accepts(grammar, text)] == []
        assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
async def test_no_reasoning_at_all(client, master, fields, good, bad):
    for prompt_end, before in (("<think>\n", "</think>\n\n"), ("", ""), ("<think>\n\n</think>\n\n", "")):
        master.prompt_end = prompt_end
        await client.post(URL, json={"messages": MESSAGES, "thinking_token_budget": 0, **fields})
        grammar = master.requests[-1].params.grammar
        assert [text for text in good if not accepts(grammar, before + text)] == []
        assert [text for text in bad if accepts(grammar, before + text)] == []
        assert [text for text in good if accepts(grammar, SHORT + text)] == []


@pytest.mark.parametrize("fields", [
    {"thinking_token_budget": None}, {"thinking_token_budget": -1}, {"thinking_token_budget": 9, "max_tokens": 9},
    {"thinking_token_budget": INFO.max_model_len}])
async def test_what_limits_nothing_has_no_grammar(client, master, fields):
    response = await client.post(URL, json={"messages": MESSAGES, **fields})
    assert response.status_code == 200
    assert master.requests[-1].params.grammar is None
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize(("formats", "fields", "word"), [
    (("hermes", "qwen3"), {"thinking_token_budget": -2}, "at least 0"),
    (("hermes", "qwen3"), {"thinking_token_budget": 3, "use_beam_search": True}, "use_beam_search"),
    (("hermes", None), {"thinking_token_budget": 3}, "--reasoning-parser"),
    (("gpt_oss", "gpt_oss"), {"thinking_token_budget": 3}, "gpt_oss"),
])
async def test_400(client, master, formats, fields, word):
    master.output_format = output_format(*formats, ModelHints())
    response = await client.post(URL, json={"messages": MESSAGES, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert word in error["message"]


async def test_completions_have_no_reasoning_to_bound(client):
    response = await client.post("/v1/completions", json={"prompt": "x", "thinking_token_budget": 3})
    assert response.json()["error"]["param"] == "thinking_token_budget"


THINKING = {"messages": MESSAGES, "max_tokens": 4000, "thinking": {"type": "enabled", "budget_tokens": 1024}}


async def test_anthropics_budget(client, master):
    master.info = structs.replace(INFO, max_model_len=8192)
    await client.post("/v1/messages", json=THINKING)
    grammar = master.requests[-1].params.grammar
    assert accepts(grammar, f"<think>{'a' * 1000}</think>Hello")
    assert not accepts(grammar, f"<think>{'a' * 1025}</think>Hello")
    await client.post("/v1/messages", json={**THINKING, "thinking": {"type": "adaptive"}})
    assert master.requests[-1].params.grammar is None


async def test_anthropics_budget_for_a_model_that_does_not_reason(client, master):
    master.info = structs.replace(INFO, max_model_len=8192)
    master.output_format = output_format("hermes", None, ModelHints())
    assert (await client.post("/v1/messages", json=THINKING)).status_code == 200
    assert master.requests[-1].params.grammar is None


async def test_anthropics_budget_for_a_model_without_grammars(client, master):
    async def check(grammar, param):
        raise InvalidParameter(param, f"{param} cannot be used: the tokenizer is unknown.")

    master.info, master.grammars.check = structs.replace(INFO, max_model_len=8192), check
    assert (await client.post("/v1/messages", json=THINKING)).status_code == 200
    assert master.requests[-1].params.grammar is None
    forced = {**THINKING, "tools": [{"name": "f"}], "tool_choice": {"type": "any"}}
    assert (await client.post("/v1/messages", json=forced)).status_code == 400
