"""OpenAI's Responses API: with its own client, and event by event."""

import asyncio
import json

import openai
import pydantic
import pytest

from tests.service.conftest import client_of, live_server
from tests.service.fake_master import output, says
from xllm_npu.service.response_store import ResponseStore, StoredResponse
from xllm_npu.state.output import SequenceDelta
from xllm_npu.text.output_format import ModelHints, output_format

URL = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Now.", "parameters": SCHEMA, "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "<think>\nHm.\n</think>\n\nLet me see.\n" + CALL


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "input": "Weather in Paris?", **fields}


@pytest.fixture(autouse=True)
def formats(master):
    master.output_format = output_format("hermes", "qwen3", ModelHints())


def events_of(text: str) -> list[dict]:
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_whole_reply(client, master):
    master.script = says("Hello", " world", cached=2)
    reply = (await client.post(URL, json=body(metadata={"a": "b"}, max_output_tokens=50, temperature=0.5))).json()
    assert reply["id"].startswith("resp_")
    [message] = reply["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {"type": "message", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]}
    assert reply["usage"] == {
        "input_tokens": 23, "output_tokens": 11, "total_tokens": 34,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}}
    expected = {"object": "response", "status": "completed", "error": None, "incomplete_details": None,
                "metadata": {"a": "b"}, "max_output_tokens": 50, "temperature": 0.5, "store": False, "model": "tiny",
                "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}}
    assert {name: reply[name] for name in expected} == expected
    assert master.requests[0].params.max_tokens == 50


async def test_reasoning_text_and_a_call(client, master):
    master.script = says(ANSWER)
    reply = (await client.post(URL, json=body(tools=[WEATHER]))).json()
    reasoning, message, call = reply["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    assert call["call_id"].startswith("call_")
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert master.template_kwargs["tools"][0]["function"]["parameters"] == SCHEMA
    assert reply["tools"] == [WEATHER]


async def test_events_in_order(client, master):
    master.script = says(*ANSWER)
    events = events_of((await client.post(URL, json=body(tools=[WEATHER], stream=True))).text)
    kinds = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]
    assert list(dict.fromkeys(kinds)) == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.done", 0),
        ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1), ("output_text.done", 1),
        ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.done", 2),
        ("output_item.done", 2), ("completed", None)]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[2]["arguments"] == ""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_length_is_incomplete(client, master, stream):
    master.script = says("Hel", "lo", finish="length")
    response = await client.post(URL, json=body(stream=stream))
    reply = events_of(response.text)[-1]["response"] if stream else response.json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete"


async def test_a_failure_in_the_stream(client, master):
    async def script(request):
        yield output(request, SequenceDelta(0, "x", [1]))
        yield output(request, finished=True, error="The engine stopped.")

    master.script = script
    events = events_of((await client.post(URL, json=body(stream=True))).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "The engine stopped."}
    assert (await client.post(URL, json=body())).status_code == 500


async def test_items_become_messages(client, master):
    await client.post(URL, json=body(instructions="Be brief.", input=[
        {"role": "developer", "content": "Rules."}, {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "function_call", "call_id": "c3", "name": "get_weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c3", "output": "-"}], reasoning={"effort": "low"}))
    roles = [message["role"] for message in master.messages]
    assert roles == ["system", "developer", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assistant = master.messages[3]
    assert (assistant["reasoning"], assistant["content"]) == ("Hm.", [{"type": "text", "text": "Let me see."}])
    assert [(call["id"], call["function"]["arguments"]) for call in assistant["tool_calls"]] == [
        ("c1", {"city": "Paris"}), ("c2", {})]
    assert master.messages[4] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert master.template_kwargs["kwargs"]["reasoning_effort"] == "low"


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"), ({"input": [{"role": "tool", "content": ""}]},
                                                                  "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function", "name": "a b"}]},
                                                             "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"temperature": 9}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"background": True}, "background"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"text": {"format": "json"}}, "text.format"), ({"truncation": "x"}, "truncation"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"), ({"metadata": {"a": 5}}, "metadata.a")])
async def test_400_names_the_field(client, master, fields, param):
    response = await client.post(URL, json=body(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert master.requests == []


async def test_nothing_is_kept_by_default(client):
    reply = (await client.post(URL, json=body(store=True))).json()
    assert reply["store"] is False
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        response = await client.request(method, f"{URL}/{reply['id']}{path}")
        assert response.status_code == 404
        assert "--responses-store-size" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_the_store(master, stream):
    async with client_of(master, responses_store_size=2) as client:
        master.script = says(ANSWER)
        response = await client.post(URL, json=body(instructions="One.", tools=[WEATHER], stream=stream))
        first = events_of(response.text)[-1]["response"] if stream else response.json()
        assert first["store"] is True
        assert (await client.get(f"{URL}/{first['id']}")).json() == first
        items = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
        assert items[0]["content"][0]["text"] == "Weather in Paris?"
        call = first["output"][2]
        master.script = says("Sunny.")
        second = (await client.post(URL, json=body(instructions="Two.", previous_response_id=first["id"], input=[
            {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]))).json()
        assert [m["role"] for m in master.messages] == ["system", "user", "assistant", "tool"]
        assert master.messages[0]["content"] == "Two."
        assert master.messages[2]["tool_calls"][0]["id"] == call["call_id"]
        third = (await client.post(URL, json=body(previous_response_id=second["id"], input="Thanks"))).json()
        assert [m["role"] for m in master.messages] == ["user", "assistant", "tool", "assistant", "user"]
        unstored = (await client.post(URL, json=body(store=False))).json()
        for id, status in ((first["id"], 404), (second["id"], 200), (third["id"], 200), (unstored["id"], 404)):
            assert (await client.get(f"{URL}/{id}")).status_code == status
        assert (await client.post(f"{URL}/{third['id']}/cancel")).status_code == 400
        assert (await client.delete(f"{URL}/{third['id']}")).json() == {
            "id": third["id"], "object": "response", "deleted": True}
        gone = await client.post(URL, json=body(previous_response_id=third["id"]))
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")


def test_the_store_is_bounded_and_drops_what_was_used_least_recently():
    store = ResponseStore(3, max_bytes=100)
    for name, size in (("a", 10), ("b", 10), ("c", 10)):
        store.put(name, StoredResponse(b"", [], [], size))
    assert store.get("a") is not None
    store.put("d", StoredResponse(b"", [], [], 10))
    store.check_integrity()
    assert [store.get(name) is not None for name in "abcd"] == [True, False, True, True]
    store.put("e", StoredResponse(b"", [], [], 85))
    store.check_integrity()
    assert len(store) == 2
    store.put("f", StoredResponse(b"", [], [], 101))
    store.check_integrity()
    assert len(store) == 0


LOGPROBS = ["message.output_text.logprobs"]


async def test_log_probabilities_are_those_of_the_answer(client, master):
    """Neither reasoning nor calls have any; a text on each side of a call has its own."""
    master.output_format = output_format("qwen3_coder", "qwen3", ModelHints())
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    said = f"<think>\nHm.\n</think>\n\nLet me see. {call} So it is."
    for pieces in ((said,), tuple(said)):
        master.script = says(*pieces)
        reply = (await client.post(URL, json=body(tools=[WEATHER], include=LOGPROBS, top_logprobs=2))).json()
        assert master.requests[-1].params.logprobs == 2
        assert reply["top_logprobs"] == 2
        assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call", "message"]
        for item in (reply["output"][1], reply["output"][3]):
            [part] = item["content"]
            assert part["text"].strip() in ("Let me see.", "So it is.")
            assert "".join(one["token"] for one in part["logprobs"]).strip() == part["text"].strip()
            first = part["logprobs"][-1]
            assert first == {"token": ".", "logprob": -0.5, "bytes": [46], "top_logprobs": [
                {"token": ".", "logprob": -0.5, "bytes": [46]}, {"token": "/", "logprob": -1.5, "bytes": [47]}]}
        assert "logprobs" not in reply["output"][0]["content"][0]


async def test_log_probabilities_unless_asked_for(client, master):
    for fields in ({}, {"top_logprobs": 5}, {"include": ["reasoning.encrypted_content"]}):
        reply = (await client.post(URL, json=body(**fields))).json()
        assert master.requests[-1].params.logprobs is None
        assert reply["output"][0]["content"][0]["logprobs"] == []


class City(pydantic.BaseModel):
    city: str


async def test_the_openai_client(master):
    async with live_server(master, responses_store_size=8) as server, openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        master.script = says(*ANSWER)
        async with client.responses.stream(model="tiny", input="Weather in Paris?", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert first.output_text.strip() == "Let me see."
        [call] = [item for item in first.output if item.type == "function_call"]
        master.script = says("It is sunny.")
        history = [{"role": "user", "content": "Weather in Paris?"}, *first.output,
                   {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        second = await client.responses.create(model="tiny", input=history, tools=[WEATHER])
        assert second.output_text == "It is sunny."
        assert [m["role"] for m in master.messages] == ["user", "assistant", "tool"]
        third = await client.responses.create(model="tiny", input="And?", previous_response_id=second.id)
        assert (await client.responses.retrieve(third.id)).output_text == "It is sunny."
        assert (await client.responses.input_items.list(third.id)).data[0].content[0].text == "And?"
        await client.responses.delete(third.id)
        master.script = says("It ", "is so.")
        asked = {"model": "tiny", "input": "x", "include": LOGPROBS, "top_logprobs": 2}
        [part] = (await client.responses.create(**asked)).output[0].content
        assert [one.token for one in part.logprobs] == list("It is so.")
        assert part.logprobs[0].top_logprobs[1].logprob == -1.5
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [one.token for one in deltas] == [one.token for one in done.logprobs] == list("It is so.")
        assert final.output[0].content[0].logprobs == part.logprobs
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)


async def test_the_sync_openai_client(master):
    def use(url: str) -> str:
        with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
            return "".join(event.delta for event in client.responses.create(model="tiny", input="Hi", stream=True)
                           if event.type == "response.output_text.delta")

    async with live_server(master) as server:
        assert await asyncio.to_thread(use, server.url) == "Hello world"
