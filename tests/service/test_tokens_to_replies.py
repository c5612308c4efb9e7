"""From tokens to replies, with nothing made up between engine and route: stop strings anywhere in the text, length at
any token, markers that are special tokens, several tokens a step and several sequences.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.service.conftest import client_of
from tests.service.scripted_master import ScriptedMaster
from tests.service.test_stream_equals_whole import both, folded_choices, whole_choices
from tests.support.tiny_tokenizer import byte_tokenizer, write_tokenizer
from xllm_npu.text.model_hints import ModelHints
from xllm_npu.text.output_events import Content, Reasoning, ToolCall
from xllm_npu.text.output_format import output_format
from xllm_npu.text.tokenizer import Tokenizer
from xllm_npu.text.tool_spec import ToolSpec

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich ✓"}}\n</tool_call>'
TEXT = "<think>\nEr will wissen, wie spät es ist ✓.\n</think>\n\nGleich. " + CALL
TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORMAT = output_format("hermes", "qwen3", ModelHints())


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """Of single bytes; with the markers of calls as text, and as special tokens."""
    result = {}
    for name, markers in (("text", ()), ("special", ("<tool_call>", "</tool_call>"))):
        backend = byte_tokenizer()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
        directory = tmp_path_factory.mktemp(name)
        write_tokenizer(directory, backend)
        result[name] = Tokenizer(directory)
    return result


def expected(text: str, cut_short: bool) -> dict:
    parser = FORMAT.parser([ToolSpec("f")], "")
    events = parser.push(text) + parser.finish(cut_short)
    return {"content": "".join(e.text for e in events if isinstance(e, Content)),
            "reasoning": "".join(e.text for e in events if isinstance(e, Reasoning)),
            "calls": [[e.name, e.arguments] for e in events if isinstance(e, ToolCall)]}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), markers=st.sampled_from(("text", "special")), step=st.sampled_from((1, 2, 5, 1000)),
       n=st.integers(1, 3))
async def test_the_reply_is_what_the_text_says(tokenizers, data, markers, step, n):
    texts = [data.draw(st.sampled_from((TEXT, TEXT[:90], CALL, "Hallo ✓"))) for _ in range(n)]
    master = ScriptedMaster(tokenizers[markers], texts, step)
    master.output_format = FORMAT
    body = {"messages": [{"role": "user", "content": "x"}], "n": n, "tools": TOOLS, "return_token_ids": True}
    ending = data.draw(st.sampled_from(("itself", "length", "stop")))
    start = data.draw(st.integers(0, len(TEXT) - 1))
    if ending == "length":
        body["max_tokens"] = 1 + start
    elif ending == "stop":
        body["stop"] = TEXT[start:start + data.draw(st.integers(1, 4))]
    async with client_of(master) as client:
        whole, chunks = await both(client, "/v1/chat/completions", body)
    for choice in whole["choices"]:
        choice["logprobs"] = {"content": []}
    choices = whole_choices(whole)
    assert folded_choices(chunks, n) == choices
    for choice, text in zip(choices, texts):
        shown, reason, cut = text, "stop", False
        if ending == "length" and body["max_tokens"] <= len(tokenizers[markers].encode(text, False)):
            ids = tokenizers[markers].encode(text, False)[: body["max_tokens"]]
            shown, reason, cut = tokenizers[markers].decode(ids, False), "length", True
        elif ending == "stop" and body["stop"] in text:
            shown, cut = text[: text.index(body["stop"])], True
            assert choice["stop_reason"] == body["stop"]
        result = expected(shown, cut)
        assert {name: choice[name] for name in result} == result
        assert choice["finish_reason"] == ("tool_calls" if result["calls"] and reason == "stop" else reason)


async def test_special_tokens_that_are_no_markers_stay_hidden(tokenizers):
    master = ScriptedMaster(tokenizers["special"], ["a<|pad|>b" + CALL], 1)
    master.output_format = FORMAT
    async with client_of(master) as client:
        reply = await client.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == "ab"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich ✓"}


@pytest.mark.parametrize("step", [1, 3, 100])
async def test_reasoning_within_a_budget(tokenizers, step):
    """The reply is the same in pieces, and usage counts no more than the budget."""
    texts = ["<think>Hm, let </think>Hello.", "<think></think>" + CALL, "No thought.", "<think>🎉🎉🎉🎉</think>x"]
    master = ScriptedMaster(tokenizers["text"], texts, step)
    master.output_format = FORMAT
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "thinking_token_budget": 13, "n": 4,
            "max_tokens": 500, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with client_of(master) as client:
        whole = (await client.post("/v1/chat/completions", json={**body, "stream_options": None})).json()
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [choice["message"]["reasoning"] for choice in whole["choices"]] == ["Hm, let", None, None, "🎉🎉🎉🎉"]
    for choice in whole["choices"]:
        choice["logprobs"] = {"content": []}
    assert folded_choices([chunk for chunk in chunks if chunk["choices"]], 4) == whole_choices(whole)
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 7 + 0 + 0 + 13
