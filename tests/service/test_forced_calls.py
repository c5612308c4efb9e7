"""Calls that a request forces, and answers whose form it gives: the grammar that the engine is held to."""

import json

import pytest

from tests.service.fake_master import accepts, says
from xllm_npu.text.output_format import ModelHints, output_format

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
          "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(autouse=True)
def formats(master):
    master.output_format = output_format("hermes", "qwen3", ModelHints())


JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NAMED = {"type": "function", "function": {"name": "get_time"}}
JSON = '{"city": "Paris"}'


@pytest.mark.parametrize(("fields", "good", "bad"), [
    ({"tool_choice": "required"}, [CALL, OTHER, THOUGHT + CALL, CALL + "\n" + OTHER], ["Hello", JSON, CALL + "x"]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [CALL + "\n" + OTHER]),
    ({"tool_choice": NAMED}, [OTHER], [CALL, OTHER + "\n" + OTHER, "Hello"]),
    ({"tool_choice": "required", "response_format": FORMAT}, [CALL], [JSON]),
    ({"response_format": FORMAT}, [JSON, THOUGHT + JSON, CALL, THOUGHT + CALL], ["Hello", "Hello " + JSON]),
    ({"response_format": FORMAT, "tool_choice": "none"}, [JSON, THOUGHT + JSON], [CALL]),
    ({"response_format": FORMAT, "tools": None}, [JSON, THOUGHT + JSON], [CALL]),
])  # fmt: skip
async def test_the_grammar(client, master, fields, good, bad):
    master.script = says(CALL)
    response = await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER, TIME], **fields})
    assert response.status_code == 200, response.text
    grammar = master.requests[-1].params.grammar
    assert master.grammars.checked[-1][0] == grammar
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


async def test_reasoning_that_the_prompt_has_begun_or_ended(client, master):
    for prompt_end, good, bad in (("<think>\n", "Hm.\n</think>\n\n" + CALL, CALL),
                                  ("<think>\n\n</think>\n\n", CALL, "Hm.\n</think>\n\n" + CALL)):
        master.prompt_end = prompt_end
        await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"})
        grammar = master.requests[-1].params.grammar
        assert accepts(grammar, good)
        assert not accepts(grammar, bad)


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
BAD = CALL.replace('{"city": "Paris"}', '{"city": 5}')
BAD_OTHER = OTHER.replace("{}}", '{"zone": 1}}')


@pytest.mark.parametrize(("fields", "good", "bad"), [
    ({}, ["Hello", CALL, THOUGHT + CALL, "Well.\n" + CALL + "\nAnd:\n" + OTHER, BAD_OTHER],
     [BAD, "Well.\n" + BAD, THOUGHT + BAD, CALL + "\n" + BAD]),
    ({"parallel_tool_calls": False}, [CALL, "Well.\n" + CALL + "\nSo it is."], [CALL + "\n" + OTHER, BAD]),
    ({"response_format": FORMAT}, [JSON, CALL], [BAD, "Hello"]),
])  # fmt: skip
async def test_calls_of_strict_tools_among_text(client, master, fields, good, bad):
    master.script = says("Well.\n" + CALL)
    response = await client.post(URL, json={"messages": MESSAGES, "tools": [STRICT, TIME], **fields})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = master.requests[-1].params.grammar
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


async def test_strict_tools_of_the_other_apis(client, master):
    await client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 9, "tools": [
        {"name": "get_weather", "input_schema": SCHEMA, "strict": True}]})
    await client.post("/v1/responses", json={"input": "x", "tools": [
        {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]})
    assert len(master.requests) == 2
    for request in master.requests:
        assert accepts(request.params.grammar, "Well. " + CALL)
        assert not accepts(request.params.grammar, "Well. " + BAD)


async def test_strict_where_text_does_not_tell_a_call(client, master):
    """Models that write bare JSON, and searches, which have no grammars."""
    for fields in ({"use_beam_search": True, "n": 2}, {}):
        response = await client.post(URL, json={"messages": MESSAGES, "tools": [STRICT], **fields})
        assert response.status_code == 200
        assert master.requests[-1].params.grammar is None
        master.output_format = output_format("json", None, ModelHints())


async def test_free_answers_have_no_grammar(client, master):
    await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER]})
    assert master.requests[-1].params.grammar is None
    assert master.grammars.checked == []


async def test_the_other_apis_force_calls_too(client, master):
    await client.post("/v1/messages", json={
        "messages": MESSAGES, "max_tokens": 9, "tool_choice": {"type": "any"},
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}]})
    assert accepts(master.requests[-1].params.grammar, CALL)
    await client.post("/v1/responses", json={
        "input": "x", "tool_choice": {"type": "function", "name": "get_weather"},
        "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]})
    assert accepts(master.requests[-1].params.grammar, CALL)
    await client.post("/v1/responses", json={"input": "x", "text": {"format": {
        "type": "json_schema", "name": "n", "schema": SCHEMA}}})
    assert accepts(master.requests[-1].params.grammar, JSON)
    await client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 9, "output_config": {
        "format": {"type": "json_schema", "schema": SCHEMA}}})
    assert accepts(master.requests[-1].params.grammar, JSON)


STRANGE = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "strange"}}, "required": ["a"]}}}
UNIQUE = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}


@pytest.mark.parametrize(("url", "body", "param"), [
    (URL, {"messages": MESSAGES, "tools": [STRANGE], "tool_choice": "required"}, "tools"),
    (URL, {"messages": MESSAGES, "tools": [UNIQUE]}, "tools"),
    (URL, {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "use_beam_search": True},
     "tool_choice"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "output_config": {
        "format": {"type": "json_schema", "schema": 5}}}, "output_config.format")])
async def test_400(client, master, url, body, param):
    response = await client.post(url, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", param).startswith(param)
    assert param in error["message"]
    assert master.requests == []


async def test_a_server_that_reads_no_calls_takes_no_tools(client, master):
    master.output_format = output_format(None, None, ModelHints())
    response = await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER]})
    assert response.json()["error"]["param"] == "tools"
    ok = await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none"})
    assert ok.status_code == 200


async def test_of_a_forced_call_that_is_cut_short_nothing_is_shown(client, master):
    master.output_format = output_format("json", None, ModelHints())
    for text, count in ((JSON_CALL + "\n" + JSON_CALL[:12], 1), (JSON_CALL[:12], 0)):
        master.script = says(text, finish="length")
        body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
        message = (await client.post(URL, json=body)).json()["choices"][0]["message"]
        assert len(message.get("tool_calls", ())) == count
        assert not message["content"]
        free = (await client.post(URL, json={**body, "tool_choice": "auto"})).json()["choices"][0]["message"]
        assert free["content"]


async def test_a_forced_call_is_read(client, master):
    master.script = says(THOUGHT + CALL)
    reply = (await client.post(URL, json={"messages": MESSAGES, "tools": [WEATHER], "tool_choice": {
        "type": "function", "function": {"name": "get_weather"}}})).json()
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
