"""Tools and reasoning in chat: what a request asks, what the model is shown, what its text becomes."""

import json

import pytest

from tests.service.fake_master import says
from xllm_npu.text.output_format import ModelHints, output_format

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, TIME], **fields}


@pytest.fixture(autouse=True)
def formats(master):
    master.output_format = output_format("hermes", "qwen3", ModelHints())


async def ask(client, **fields: object) -> dict:
    response = await client.post(URL, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client, **fields: object) -> list[dict]:
    response = await client.post(URL, json=body(stream=True, **fields))
    frames = response.text[:-2].split("\n\n")
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def test_a_call_whole(client, master):
    master.script = says(THOUGHT + "Let me see. " + CALL)
    reply = await ask(client)
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"].strip() == "Let me see."
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_only_a_call_has_no_content(client, master):
    master.script = says(CALL)
    message = (await ask(client))["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning"] is None


async def test_no_call_leaves_tool_calls_out(client):
    choice = (await ask(client))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None, "reasoning": None,
                                 "reasoning_content": None}
    assert choice["finish_reason"] == "stop"


async def test_ids_of_mistrals_calls_are_what_its_template_takes_back(client, master):
    for name, text in (("mistral", '[TOOL_CALLS]get_time[ARGS]{}'),
                       ("mistral_v3", '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]')):
        master.output_format = output_format(name, None, ModelHints())
        master.script = says(text)
        [call] = (await ask(client))["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


async def test_a_call_streamed(client, master):
    master.script = says(*THOUGHT, *CALL)
    sent = await chunks(client, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in sent[:-1]]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["id"].startswith("call_")
    assert calls[0] == {"index": 0, "id": calls[0]["id"], "type": "function",
                        "function": {"name": "get_weather", "arguments": ""}}
    assert {"id", "type"}.isdisjoint(calls[1])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Paris"}
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."
    assert sent[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert sent[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_parallel_calls_and_not(client, master):
    master.script = says(TWO_CALLS)
    calls = (await ask(client))["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather", "get_time"]
    assert len({call["id"] for call in calls}) == 2
    calls = (await ask(client, parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather"]
    sent = await chunks(client)
    indices = [c["index"] for chunk in sent for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert indices == [0, 0, 1, 1]


async def test_a_call_that_is_cut_short_is_none(client, master):
    master.script = says("Well. " + CALL[:40], finish="length")
    choice = (await ask(client))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].strip() == "Well."


async def test_a_stop_string_in_a_call_leaves_no_half_of_it(client, master):
    master.script = says("Well. " + CALL[:40], finish="stop", stop_reason="Par")
    choice = (await ask(client, stop=["Par"]))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Par")
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].strip() == "Well."


async def test_length_after_a_call_stays_length(client, master):
    master.script = says(CALL + "\nAnd", finish="length")
    choice = (await ask(client))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1


async def test_no_tools_no_calls(client, master):
    master.script = says(CALL)
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message = (await ask(client, **fields))["choices"][0]["message"]
        assert "tool_calls" not in message
        assert message["content"] == CALL
        assert "tools" not in master.template_kwargs


async def test_the_template_gets_the_tools(client, master):
    await ask(client)
    shown = master.template_kwargs["tools"]
    assert shown[0] == WEATHER
    assert shown[1]["function"] == {"name": "get_time", "description": "",
                                    "parameters": {"type": "object", "properties": {}}}
    assert master.requests[0].params.shown_special_tokens == ("</think>", "</tool_call>", "<think>", "<tool_call>")


async def test_allowed_tools_are_the_only_ones(client, master):
    allowed = {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}}
    await ask(client, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in master.template_kwargs["tools"]] == ["get_time"]


async def test_reasoning_left_out_on_request(client, master):
    master.script = says(THOUGHT, "Sunny.")
    reply = await ask(client, include_reasoning=False)
    assert reply["choices"][0]["message"]["reasoning"] is None
    assert reply["choices"][0]["message"]["content"] == "Sunny."
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    sent = await chunks(client, include_reasoning=False)
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in sent)


async def test_reasoning_that_the_prompt_has_begun(client, master):
    master.prompt_end = "<think>\n"
    master.script = says("Hm.\n</think>\n\nSunny.")
    message = (await ask(client))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Sunny.")


async def test_logprobs_of_tokens_that_are_held_back(client, master):
    master.script = says(*CALL)
    whole = (await ask(client, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert len(whole) == len(CALL)
    streamed = []
    for chunk in await chunks(client, logprobs=True):
        streamed += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == whole


async def test_a_history_with_calls(client, master):
    history = [*MESSAGES,
               {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [
                   {"id": "call_1", "type": "function", "index": 0,
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
                   {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}}]},
               {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
               {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]}]
    await ask(client, messages=history)
    calls = master.messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Paris"}, {}]
    assert master.messages[2]["tool_call_id"] == "call_1"


async def test_a_history_with_what_a_model_may_have_written(client, master):
    odd = '{"a": 1e999, "b": "\\ud800x \\ud83d\\ude00", "c": 123456789012345678901234567890}'
    await ask(client, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": odd}}]}])
    arguments = master.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a": float("inf"), "b": "?x 😀", "c": 123456789012345678901234567890}


async def test_effort_none_switches_thinking_off(client, master):
    await ask(client, reasoning_effort="none")
    assert master.template_kwargs["kwargs"] == {"reasoning_effort": "none", "enable_thinking": False,
                                                "thinking": False}


def tool(**function: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools[0].type"), ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [TIME] * 129}, "tools"),
    ({"tools": tool(name="a b")}, "tools[0].function.name"),
    ({"tools": tool(name="x" * 129)}, "tools[0].function.name"),
    ({"tools": tool(name="")}, "tools[0].function.name"), ({"tools": [TIME, TIME]}, "tools[1].function.name"),
    ({"tools": tool(description=5)}, "tools[0].function.description"),
    ({"tools": tool(strict="yes")}, "tools[0].function.strict"),
    ({"tools": tool(parameters=[])}, "tools[0].function.parameters"),
    ({"tools": tool(parameters={"type": "array"})}, "tools[0].function.parameters"),
    ({"tools": tool(parameters={"description": "x" * 70_000})}, "tools[0].function.parameters"),
    ({"tools": tool(parameters={"a": json.loads("[" * 40 + "]" * 40)})}, "tools[0].function.parameters"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"), ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice.allowed_tools.tools"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls")])
async def test_400_names_the_field(client, master, fields, param):
    response = await client.post(URL, json=body(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert master.requests == []


@pytest.mark.parametrize(("field", "hint"), [("functions", "tools"), ("function_call", "tool_choice")])
async def test_the_old_names_have_a_hint(client, field, hint):
    response = await client.post(URL, json={"messages": MESSAGES, field: [{"name": "f"}]})
    assert response.status_code == 400
    assert f"Send {hint} instead" in response.json()["error"]["message"]


async def test_tokenize_knows_tools(client, master):
    response = await client.post("/tokenize", json={"messages": MESSAGES, "tools": [WEATHER]})
    assert response.status_code == 200
    assert master.template_kwargs["tools"] == [WEATHER]


async def test_a_batch_of_conversations(client, master):
    master.script = says("Hello", cached=1)
    response = await client.post(URL + "/batch", json={"messages": [MESSAGES, [{"role": "user", "content": "Hi"}]],
                                                       "max_tokens": 7})
    reply = response.json()
    assert [(c["index"], c["message"]["content"]) for c in reply["choices"]] == [(0, "Hello"), (1, "Hello")]
    assert [bytes(r.prompt_token_ids) for r in master.requests] == [b"<user>Weather in Paris?", b"<user>Hi"]
    assert [r.params.max_tokens for r in master.requests] == [7, 7]
    assert reply["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(("fields", "param"), [
    ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"),
    ({"messages": MESSAGES}, "messages[0]"), ({"messages": [[]]}, "messages[0]"), ({"messages": []}, "messages"),
    ({"messages": [MESSAGES] * 129}, "messages"), ({"messages": [[{"role": 5}]]}, "messages[0].role")])
async def test_what_a_batch_cannot(client, fields, param):
    response = await client.post(URL + "/batch", json={"messages": [MESSAGES], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
