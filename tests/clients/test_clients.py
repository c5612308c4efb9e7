"""What people build on, unmodified: litellm, LangChain and instructor, each against a server on a socket.

`make test-clients` installs them; they are too heavy for every change. The openai and anthropic packages themselves are
tested with the routes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import openai
import pydantic
import pytest

from tests.service.conftest import live_server
from tests.service.fake_master import FakeMaster, says
from xllm_npu.text.output_format import ModelHints, output_format

pytestmark = pytest.mark.clients
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class City(pydantic.BaseModel):
    """A city."""

    name: str
    country: str


CITY = '{"name": "Paris", "country": "France"}'


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[FakeMaster, Callable]]:
    """The master, and a way to call a function of the server's URL on a thread."""
    master = FakeMaster()
    master.output_format = output_format("hermes", "qwen3", ModelHints())
    async with live_server(master) as live:
        yield master, lambda function: asyncio.to_thread(function, live.url)


async def test_litellm():
    import litellm

    def ask(url: str, provider: str, **fields):
        base = url + "/v1" if provider == "openai" else url
        return litellm.completion(model=f"{provider}/tiny", api_base=base, api_key="x", messages=MESSAGES, **fields)

    async with server() as (master, call):
        for provider in ("openai", "anthropic"):
            master.script = says("<think>\nHm.\n</think>\n\n", "Let me see. " + CALL)
            reply = await call(lambda url, p=provider: ask(url, p, tools=[WEATHER], max_tokens=50))
            message = reply.choices[0].message
            assert message.tool_calls[0].function.name == "get_weather"
            assert message.reasoning_content == "Hm."
            assert reply.choices[0].finish_reason == "tool_calls"
            master.script = says("Hello", " world")
            chunks = await call(lambda url, p=provider: list(ask(url, p, stream=True, max_tokens=50)))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"


async def test_langchain():
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def model(url: str, **fields) -> ChatOpenAI:
        return ChatOpenAI(base_url=url + "/v1", api_key="x", model="tiny", max_retries=0, **fields)

    async with server() as (master, call):
        master.script = says(CALL)
        question = HumanMessage("Weather in Paris?")
        answer = await call(lambda url: model(url).bind_tools([WEATHER]).invoke([question]))
        assert answer.tool_calls[0]["args"] == {"city": "Paris"}
        master.script = says("Sunny", ".")
        history = [question, answer, ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])]
        streamed = await call(lambda url: [chunk.text for chunk in model(url).bind_tools([WEATHER]).stream(history)])
        assert "".join(streamed) == "Sunny."
        assert [m["role"] for m in master.messages] == ["user", "assistant", "tool"]
        master.script = says(CITY)
        found = await call(lambda url: model(url).with_structured_output(City).invoke("Paris?"))
        assert found == City(name="Paris", country="France")
        assert master.requests[-1].params.grammar
        master.script = says("By responses.")
        whole = await call(lambda url: model(url, use_responses_api=True).invoke("Hi"))
        assert whole.text == "By responses."


async def test_instructor():
    import instructor

    def ask(url: str, mode: instructor.Mode) -> City:
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0), mode=mode)
        return client.chat.completions.create(model="tiny", messages=MESSAGES, response_model=City, max_retries=0)

    async with server() as (master, call):
        master.script = says('<tool_call>\n{"name": "City", "arguments": ' + CITY + "}\n</tool_call>")
        assert (await call(lambda url: ask(url, instructor.Mode.TOOLS))).country == "France"
        assert master.requests[-1].params.grammar
        master.script = says(CITY)
        assert (await call(lambda url: ask(url, instructor.Mode.JSON))).name == "Paris"
        assert (await call(lambda url: ask(url, instructor.Mode.JSON_SCHEMA))).name == "Paris"
