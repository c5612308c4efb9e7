"""Forced calls and answers of a form, from a random model: what it writes is what the grammar makes it write."""

import json

import anthropic
import openai
import pydantic
import pytest
from xllm_models.hub import resolve_model

from tests.support.server import ServerProcess

pytestmark = pytest.mark.multiprocess

CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "description": "Now.", "parameters": CITIES}}
         for name in ("get_weather", "get_time")]
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]


class Answer(pydantic.BaseModel):
    """The two have bounds, as a random model never ends a string."""

    yes: bool
    city: str = pydantic.Field(max_length=5)


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_forced_and_free(tmp_path):
    """Its template knows no tools: they are described, and what it was made to say comes back as text."""
    directory = resolve_model("smollm2").path
    with (ServerProcess(directory, tmp_path / "server", "--max-cache-size", "100MiB") as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client):
        fields = {"model": client.models.list().data[0].id, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
        first = client.chat.completions.create(messages=MESSAGES, tool_choice="required", parallel_tool_calls=False,
                                               **fields).choices[0].message
        [call] = first.tool_calls
        assert (call.function.name, arguments(call)) == ("get_weather", {"city": "Paris"})
        history = [*MESSAGES, first, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = client.chat.completions.create(messages=history, **fields).choices[0].message
        assert "sunny" in answer.content.lower()


def arguments(call) -> dict:
    return json.loads(call.function.arguments)


def test_a_tool_loop(openai_client: openai.OpenAI):
    fields = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    named = {"type": "function", "function": {"name": "get_time"}}
    whole = openai_client.chat.completions.create(messages=MESSAGES, tool_choice=named, **fields)
    [call] = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert call.function.name == "get_time"
    assert arguments(call)["city"] in ("Paris", "Rome")
    with openai_client.chat.completions.stream(messages=MESSAGES, tool_choice=named, **fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert [(c.function.name, arguments(c)) for c in streamed.tool_calls] == [("get_time", arguments(call))]
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    after = openai_client.chat.completions.create(messages=[*MESSAGES, whole.choices[0].message, result], **fields)
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


def test_required_calls_of_several_sequences(openai_client):
    reply = openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=3, seed=5,
        max_tokens=200)
    for choice in reply.choices:
        [call] = choice.message.tool_calls
        assert call.function.name in ("get_weather", "get_time")
        assert arguments(call)["city"] in ("Paris", "Rome")


def test_answers_of_a_form(openai_client):
    whole = openai_client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Answer, seed=1)
    assert isinstance(whole.choices[0].message.parsed, Answer)
    response = openai_client.responses.parse(model="tiny", input="x", text_format=Answer, extra_body={"seed": 1})
    assert isinstance(response.output_parsed, Answer)
    with openai_client.responses.stream(model="tiny", input="x", text_format=Answer, extra_body={"seed": 1}) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_anthropics_client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        tools = [{"name": "get_weather", "input_schema": CITIES}]
        message = client.messages.create(
            model="tiny", max_tokens=200, messages=MESSAGES, tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True})
        [block] = message.content
        assert block.input["city"] in ("Paris", "Rome")
        assert message.stop_reason == "tool_use"
        with client.messages.stream(model="tiny", max_tokens=20, messages=MESSAGES) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_text() == text
        assert client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 20
