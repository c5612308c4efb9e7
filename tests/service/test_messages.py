"""Anthropic's Messages API: with its own client, and byte for byte where clients differ."""

import asyncio
import json

import anthropic
import httpx
import pytest

from tests.service.conftest import client_of, live_server
from tests.service.fake_master import output, says
from xllm_npu.state.output import SequenceDelta
from xllm_npu.text.output_format import ModelHints, output_format

URL = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Now.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "<think>\nHm.\n</think>\n\nLet me see.\n" + CALL


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "max_tokens": 100, "messages": MESSAGES, **fields}


@pytest.fixture(autouse=True)
def formats(master):
    master.output_format = output_format("hermes", "qwen3", ModelHints())


def events_of(text: str) -> list[dict]:
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


async def test_whole_reply(client, master):
    master.script = says("Hello", " world", cached=2)
    response = await client.post(URL, json=body(), headers={"X-Request-Id": "r1"})
    assert response.headers["request-id"] == response.headers["x-request-id"] == "r1"
    assert response.json() == {
        "id": "msg_r1", "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "text", "text": "Hello world"}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 21, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
                  "output_tokens": 11}}


async def test_thinking_text_and_a_call(client, master):
    master.script = says(ANSWER)
    reply = (await client.post(URL, json=body(tools=[WEATHER]))).json()
    thinking, text, call = reply["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text["text"].strip() == "Let me see."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert reply["stop_reason"] == "tool_use"
    assert master.template_kwargs["tools"][0]["function"]["parameters"] == SCHEMA


async def test_arguments_are_the_models_own_text(client, master):
    odd = '{"a": 1e999, "b": "\\ud800", "c": 123456789012345678901234567890}'
    master.script = says('<tool_call>\n{"name": "get_weather", "arguments": ' + odd + "}\n</tool_call>")
    response = await client.post(URL, json=body(tools=[WEATHER]))
    assert response.status_code == 200
    assert odd in response.text
    assert response.json()["content"][0]["input"]["c"] == 123456789012345678901234567890


async def test_events_in_order(client, master):
    master.script = says(*ANSWER)
    events = events_of((await client.post(URL, json=body(tools=[WEATHER], stream=True))).text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == 23
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ANSWER)
    shape = [(e["type"], e["index"], e.get("delta", e.get("content_block", {})).get("type"))
             for e in events if "index" in e]
    assert list(dict.fromkeys(shape)) == [
        ("content_block_start", 0, "thinking"), ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"), ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"), ("content_block_delta", 1, "text_delta"), ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"), ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None)]
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [s.get("text", s.get("thinking", s.get("input"))) for s in starts] == ["", "", {}]


@pytest.mark.parametrize(("finish", "stop", "expected"), [
    ("stop", None, ("end_turn", None)), ("stop", "###", ("stop_sequence", "###")),
    ("length", None, ("max_tokens", None)), ("stop", 7, ("end_turn", None))])
async def test_how_it_ended(client, master, finish, stop, expected):
    master.script = says("x", finish=finish, stop_reason=stop)
    reply = (await client.post(URL, json=body(stop_sequences=["###"]))).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected
    assert master.requests[0].params.stop == ("###",)


async def test_a_conversation_becomes_chat_messages(client, master):
    await client.post(URL, json=body(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "x-anthropic-billing-header: v=1"}],
        messages=[*MESSAGES,
                  {"role": "assistant", "content": [
                      {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                      {"type": "text", "text": "Let me see."},
                      {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}]},
                  {"role": "user", "content": [
                      {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                      {"type": "text", "text": "And now?"}]}],
        temperature=0.5, top_k=3, top_p=0.9))
    assert master.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": [
            {"type": "function", "id": "t1", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]}]
    params = master.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (100, 0.5, 3, 0.9)


async def test_a_last_message_of_the_assistant_is_continued(client, master):
    await client.post(URL, json=body(messages=[*MESSAGES, {"role": "assistant", "content": "It is"}]))
    assert master.template_kwargs["continue_final_message"] is True
    assert master.template_kwargs["add_generation_prompt"] is False


@pytest.mark.parametrize(("thinking", "on"), [
    ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled", "budget_tokens": 1024}, True)])
async def test_thinking_switch(client, master, thinking, on):
    master.script = says(ANSWER)
    reply = (await client.post(URL, json=body(thinking=thinking, max_tokens=2000))).json()
    assert master.template_kwargs["kwargs"] == {"enable_thinking": on, "thinking": on}
    assert ("thinking" in [block["type"] for block in reply["content"]]) == on


async def test_count_tokens(client, master):
    response = await client.post(URL + "/count_tokens", json={"messages": MESSAGES, "system": "abc",
                                                              "tools": [WEATHER]})
    assert response.json() == {"input_tokens": len("<system>abc<user>Weather in Paris?")}
    assert master.template_kwargs["tools"]
    assert master.requests == []


@pytest.mark.parametrize(("fields", "name"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"temperature": 9}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"), ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"), ({"messages": [{"role": "tool", "content": "x"}]},
                                                          "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
     "messages[0].content[0].input"),
    ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name"), ({"tools": [{"name": "a", "input_schema": 5}]},
                                                      "tools[0].input_schema"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "on"}}, "thinking.type"), ({"thinking": {"type": "enabled", "budget_tokens": 5}},
                                                      "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format")])
async def test_400_in_its_own_form_and_names(client, master, fields, name):
    response = await client.post(URL, json=body(**fields))
    assert response.status_code == 400
    reply = response.json()
    assert reply["type"] == "error"
    assert reply["error"]["type"] == "invalid_request_error"
    assert name in reply["error"]["message"]
    assert reply["request_id"] == response.headers["request-id"]
    assert int(response.headers["content-length"]) == len(response.content)
    assert master.requests == []


async def test_errors_of_every_layer_have_its_form(master):
    async with client_of(master, api_key=("k",), max_body_bytes=1024, max_concurrent_requests=1) as client:
        for headers, status, kind in (({}, 401, "authentication_error"), ({"x-api-key": "wrong"}, 401,
                                                                          "authentication_error")):
            response = await client.post(URL, json=body(), headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        key = {"x-api-key": "k"}
        assert (await client.post(URL, json=body(), headers=key)).status_code == 200
        assert (await client.post(URL, json=body(), headers={"Authorization": "Bearer k"})).status_code == 200
        assert (await client.get("/v1/models", headers=key)).status_code == 401
        for fields, status, kind in (({"system": "x" * 2000}, 413, "request_too_large"),
                                     ({"model": "gpt"}, 404, "not_found_error")):
            response = await client.post(URL, json=body(**fields), headers=key)
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert (await client.get(URL, headers=key)).json()["type"] == "error"
        assert "type" not in (await client.post("/v1/messagesx", headers=key)).json()


async def test_a_failure_in_the_stream_is_an_error_event(client, master):
    async def script(request):
        yield output(request, SequenceDelta(0, "x", [1]))
        yield output(request, finished=True, error="The engine stopped.")

    master.script = script
    events = events_of((await client.post(URL, json=body(stream=True))).text)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The engine stopped."}}


async def test_the_anthropic_client(master):
    async with live_server(master, api_key=("k",)) as server, anthropic.AsyncAnthropic(
            base_url=server.url, api_key="k", max_retries=0) as client:
        conversation: list = [*MESSAGES]
        master.script = says(*ANSWER)
        async with client.messages.stream(model="tiny", max_tokens=2000, tools=[WEATHER], messages=conversation,
                                          thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
            text = [t async for t in stream.text_stream]
            first = await stream.get_final_message()
        assert "".join(text).strip() == "Let me see."
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.content[2].input == {"city": "Paris"}
        assert first.stop_reason == "tool_use"
        conversation += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "sunny"}]}]
        master.script = says("It is sunny.")
        second = await client.messages.create(model="tiny", max_tokens=10, tools=[WEATHER], messages=conversation)
        assert second.content[0].text == "It is sunny."
        assert [m["role"] for m in master.messages] == ["user", "assistant", "tool"]
        assert master.messages[1]["tool_calls"][0]["id"] == master.messages[2]["tool_call_id"]
        count = await client.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert count.input_tokens == 23
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.messages.create(model="gpt", max_tokens=1, messages=MESSAGES)
        assert error.value.request_id
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="x").messages.create(model="tiny", max_tokens=1, messages=MESSAGES)


async def test_the_sync_anthropic_client(master):
    def use(url: str) -> str:
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
            kinds = [event.type for event in client.messages.create(
                model="tiny", max_tokens=9, messages=MESSAGES, stream=True)]
            return " ".join(dict.fromkeys(kinds))

    async with live_server(master) as server:
        assert await asyncio.to_thread(use, server.url) == (
            "message_start content_block_start content_block_delta content_block_stop message_delta message_stop")


async def test_leaving_aborts(master):
    async def script(request):
        yield output(request, SequenceDelta(0, "x", [1]))
        await asyncio.Event().wait()

    master.script = script
    async with live_server(master) as server, httpx.AsyncClient(base_url=server.url) as client:
        post = asyncio.create_task(client.post(URL, json=body(stream=True)))
        await master.submitted_one.wait()
        post.cancel()
        await master.aborted_one.wait()
        await server.admission.idle.wait()
