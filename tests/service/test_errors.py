import asyncio
import json

import httpx
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, output
from xllm_npu.master.llm_master import EngineDeadError, EngineStatus
from xllm_npu.service.errors import ErrorBoundary
from xllm_npu.state.output import SequenceDelta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers
    reply = response.json()
    assert reply.keys() == {"error"}
    assert reply["error"].keys() == {"message", "type", "param", "code"}
    return reply["error"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"top_k": 2**40}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"logit_bias": {"1": 500}}, "logit_bias"),
    ({"logit_bias": {"999": 5}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"stream": True, "best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "length_penalty": 100}, "length_penalty"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern_size": "x"}}, "repetition_detection.max_pattern_size"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x", "reasoning": 5}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x"}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments":
      '{"a":' + "[" * 70 + "]" * 70 + "}"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"truncation_side": "up"}, "truncation_side"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"request_id": "a b"}, "request_id"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"ttft_slo_ms": -1}, "ttft_slo_ms"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
])
async def test_400_names_the_field(client, master, fields, param):
    response = await client.post(CHAT, json={"messages": MESSAGES, **fields})
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"] or "Content" in error["message"]
    assert master.requests == []


@pytest.mark.parametrize(("field", "value"), [
    ("functions", [{}]), ("suffix", "x"),
    ("modalities", ["audio"]), ("mm_processor_kwargs", {"a": 1})])
async def test_what_comes_later_is_refused_by_name(client, field, value):
    if not value:
        value = {"type": "object"}
    for url, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        error = error_of(await client.post(url, json={**prompt, field: value}), 400)
        assert error["param"] == field
        assert "not supported in this version" in error["message"]


@pytest.mark.parametrize("fields", [
    {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}},
    {"length_penalty": 1.0}, {"use_beam_search": False}, {"modalities": ["text"]}, {"invented": {"x": 1}}])
async def test_harmless_values_pass(client, fields):
    assert (await client.post(CHAT, json={"messages": MESSAGES, **fields})).status_code == 200


async def test_unknown_fields_are_named_in_the_response(client):
    fields = {"messages": MESSAGES, "top_q": 1, "a b": 2, "grün": 3, "guided_json": {}, "user": "u"}
    for stream in (False, True):
        response = await client.post(CHAT, json={**fields, "stream": stream})
        assert response.headers["X-Ignored-Fields"] == "guided_json, top_q"
    assert "X-Ignored-Fields" not in (await client.post(CHAT, json={"messages": MESSAGES})).headers
    many = {f"x{i:02}": i for i in range(50)}
    named = (await client.post(CHAT, json={"messages": MESSAGES, **many})).headers["X-Ignored-Fields"]
    assert named == ", ".join(sorted(many)[:20])


async def test_unknown_fields_leave_a_debug_line(client, caplog):
    with caplog.at_level("DEBUG", "xllm_npu.service"):
        await client.post(CHAT, json={"messages": MESSAGES, "invented": 1, "user": "u"})
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == [
        "unknown request fields ignored: 'invented'"]


@pytest.mark.parametrize(("prompt", "param"), [
    (5, "prompt"), ([], "prompt"), ([[]], "prompt[0]"), (["a", 5], "prompt[1]"), ([256], "prompt"), ([-1], "prompt"),
    ([["a"]], "prompt[0]"), ([1.5], "prompt[0]"), (None, "prompt"), ([True], "prompt[0]"), ([10**30], "prompt")])
async def test_400_for_prompts(client, prompt, param):
    assert error_of(await client.post(COMPLETIONS, json={"prompt": prompt}), 400)["param"] == param


async def test_required_field(client):
    error = error_of(await client.post(COMPLETIONS, json={}), 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt is required.")


async def test_quoted_input_is_cut(client):
    error = error_of(await client.post(CHAT, json={"messages": MESSAGES, "temperature": "x" * 10_000}), 400)
    assert len(error["message"]) < 300


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": NaN}', b'{"a": 1e999}', b'"x"', b"\xff",
                                 b'{"a":"\\ud800"}', b"[" * 100_000, b'{"a":' + b"[" * 70 + b"]" * 70 + b"}"])
async def test_bad_json(client, raw):
    error = error_of(await client.post(CHAT, content=raw, headers={"Content-Type": "application/json"}), 400)
    assert error["code"] == "invalid_json"


async def test_64_levels_are_allowed(client):
    def nested(depth: int) -> dict:
        return {"messages": MESSAGES, "x": json.loads("[" * depth + "]" * depth)}

    assert (await client.post(CHAT, json=nested(63))).status_code == 200
    assert (await client.post(CHAT, json=nested(64))).status_code == 400


async def test_415(client):
    error_of(await client.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}), 415)


async def test_404_and_405(client):
    error = error_of(await client.post(CHAT, json={"model": "gpt", "messages": MESSAGES}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(await client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
    assert error_of(await client.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_supported"
    assert response.headers["allow"] == "POST"


async def test_413_announced_or_not(master):
    async def unannounced():
        for _ in range(100):
            yield b" " * 100

    async with client_of(master, max_body_bytes=1024) as client:
        headers = {"Content-Type": "application/json"}
        error_of(await client.post(CHAT, content=b" " * 1025, headers=headers), 413)
        error_of(await client.post(CHAT, content=unannounced(), headers=headers), 413)
        assert (await client.post(CHAT, content=b" " * 1024, headers=headers)).status_code == 400


async def test_429(master):
    gate = asyncio.Event()

    async def script(request):
        await gate.wait()
        yield output(request, SequenceDelta(0, "x", [1], None, "stop"), finished=True)

    master.script = script
    async with client_of(master, max_concurrent_requests=1) as client:
        first = asyncio.create_task(client.post(CHAT, json={"messages": MESSAGES}))
        await master.submitted_one.wait()
        response = await client.post(CHAT, json={"messages": MESSAGES})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        assert b'reason="max_concurrent_requests"} 1' in master.metrics.render()
        assert (await client.get("/v1/models")).status_code == 200
        gate.set()
        assert (await first).status_code == 200
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200


async def test_503_while_loading():
    async with client_of(FakeMaster(status=EngineStatus.LOADING)) as client:
        for response in [await client.get("/health"), await client.post(CHAT, json={}), await client.get("/v1/models"),
                         await client.post("/tokenize", json={})]:
            assert error_of(response, 503)["code"] == "engine_loading"
            assert "retry-after" in response.headers
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 200


async def test_503_when_dead(master):
    master.failure = "killed by signal 9"
    async with client_of(master) as client:
        master.status = EngineStatus.DEAD
        for response in [await client.get("/health"), await client.post(CHAT, json={"messages": MESSAGES})]:
            assert error_of(response, 503)["code"] == "engine_dead"


async def test_503_when_the_engine_does_not_answer(client, master):
    master.healthy = False
    error_of(await client.get("/health"), 503)


async def test_engine_dies_between_admission_and_submission(client, master):
    def dead(request, stream):
        raise EngineDeadError("The engine process has ended.")

    master.generate = dead
    assert error_of(await client.post(CHAT, json={"messages": MESSAGES}), 503)["code"] == "engine_dead"


async def fails_after_one(request):
    yield output(request, SequenceDelta(0, "x", [1]))
    yield output(request, finished=True, error="The engine stopped.")


async def dies_after_one(request):
    yield output(request, SequenceDelta(0, "x", [1]))
    raise EngineDeadError("The engine process has ended.")


async def bug(request):
    yield output(request, SequenceDelta(0, "x", [1]))
    raise KeyError("/secret/path")


@pytest.mark.parametrize(("script", "status", "message"), [
    (fails_after_one, 500, "The engine stopped."), (dies_after_one, 503, "The engine process has ended."),
    (bug, 500, "The server had an error while processing the request.")])
@pytest.mark.parametrize(("url", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})])
async def test_failure_on_the_way(client, master, script, status, message, url, prompt):
    master.script = script
    response = await client.post(url, json=prompt)
    assert error_of(response, status)["message"] == message
    streamed = (await client.post(url, json={**prompt, "stream": True})).text
    frames = streamed[:-2].split("\n\n")
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["message"] == message
    assert "[DONE]" not in streamed
    assert "secret" not in response.text + streamed
    assert master.closed == 2


async def test_unexpected_failure_outside_generation(client, master, caplog):
    async def broken(*args, **kwargs):
        raise RuntimeError("/secret/path")

    master.encode_chat = broken
    response = await client.post(CHAT, json={"messages": MESSAGES})
    assert error_of(response, 500)["type"] == "server_error"
    assert "secret" not in response.text
    assert "/secret/path" in caplog.text


async def test_wrong_parameters_cost_no_tokenizing(client, master):
    error_of(await client.post(CHAT, json={"messages": MESSAGES, "temperature": 9}), 400)
    assert master.template_kwargs == {}


async def test_a_begun_response_is_cut_not_answered_twice():
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("x")

    async def send(message):
        sent.append(message["type"])

    with pytest.raises(KeyError):
        await ErrorBoundary(app)({"type": "http", "method": "GET", "path": "/"}, None, send)
    assert sent == ["http.response.start"]
