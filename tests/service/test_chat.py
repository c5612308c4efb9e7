import json

import httpx
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import says
from xllm_npu.state.repetition import RepetitionDetection

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": MESSAGES, **fields}


async def stream(client: httpx.AsyncClient, **fields: object) -> list[str]:
    """The response's frames, each without its blank line."""
    response = await client.post(URL, json=body(stream=True, **fields), headers={"X-Request-Id": "r1"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    return response.text[:-2].split("\n\n")


def chunks(frames: list[str]) -> list[dict]:
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


async def test_whole_reply(client, master):
    master.script = says("Hello", " world", cached=2)
    response = await client.post(URL, json=body(), headers={"X-Request-Id": "r1"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "r1"
    reply = response.json()
    assert list(reply)[:4] == ["id", "object", "created", "model"]
    assert reply.pop("created") > 1_600_000_000
    assert reply == {
        "id": "chatcmpl-r1", "object": "chat.completion", "model": "tiny", "system_fingerprint": None,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                     "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 11, "total_tokens": 19,
                  "prompt_tokens_details": {"cached_tokens": 2}}}
    assert master.closed == 1
    assert master.aborted == []


async def test_frames_byte_by_byte(client):
    frames = await stream(client)
    created = json.loads(frames[0].removeprefix("data: "))["created"]
    head = (f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created},"model":"tiny",'
            '"system_fingerprint":null,"choices":[')
    assert frames == [
        head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        head + '{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}]}',
        head + '{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}]}',
        head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
        "data: [DONE]"]


async def test_usage_chunk_on_request(client):
    sent = chunks(await stream(client, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in sent[:-1])
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"]["completion_tokens"] == 11
    assert "usage" not in chunks(await stream(client))[0]


async def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = chunks(await stream(client, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in sent] == [5, 5, 11, 11, 11]


async def test_many_choices_each_open_with_a_role(client):
    sent = chunks(await stream(client, n=3))
    assert [c["choices"][0]["index"] for c in sent[:3]] == [0, 1, 2]
    assert all(c["choices"][0]["delta"] == {"role": "assistant", "content": ""} for c in sent[:3])
    text = {0: "", 1: "", 2: ""}
    finished = []
    for chunk in sent[3:]:
        choice = chunk["choices"][0]
        text[choice["index"]] += choice["delta"].get("content", "")
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert set(text.values()) == {"Hello world"}
    assert finished == [0, 1, 2]


async def test_text_without_characters_yet_sends_no_frame(client, master):
    master.script = says("", "é")
    assert len(chunks(await stream(client))) == 3


async def test_logprobs(client, master):
    master.script = says("ab")
    reply = (await client.post(URL, json=body(logprobs=True, top_logprobs=2))).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0] == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]}
    assert master.requests[0].params.logprobs == 2
    sent = chunks(await stream(client, logprobs=True, top_logprobs=2))
    assert sent[1]["choices"][0]["logprobs"]["content"] == content


async def test_tokens_as_ids_and_token_ids(client, master):
    master.script = says("ab")
    reply = (await client.post(URL, json=body(logprobs=True, return_tokens_as_token_ids=True,
                                              return_token_ids=True))).json()
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"
    assert reply["choices"][0]["token_ids"] == [97, 98]
    assert bytes(reply["prompt_token_ids"]) == b"<user>Hi"
    sent = chunks(await stream(client, return_token_ids=True))
    assert bytes(sent[0]["prompt_token_ids"]) == b"<user>Hi"
    assert sent[1]["choices"][0]["token_ids"] == [97, 98]


async def test_prompt_logprobs(client):
    reply = (await client.post(URL, json=body(prompt_logprobs=1))).json()
    assert reply["prompt_logprobs"][0] is None
    assert reply["prompt_logprobs"][1]["117"] == {"logprob": -0.5, "rank": 1, "decoded_token": "u"}


async def test_every_field_reaches_the_engine(client, master):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "seed": 5, "min_tokens": 2, "n": 2, "best_of": 3,
        "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True}
    lists = {"stop": ["x", "y"], "stop_token_ids": [3], "allowed_token_ids": [4, 5], "bad_words": ["no"],
             "logprob_token_ids": [6]}
    response = await client.post(URL, json=body(
        **fields, **lists, logit_bias={"9": 1.5}, max_completion_tokens=33, max_tokens=44, priority=-2, offline=True,
        ttft_slo_ms=10, tpot_slo_ms=20, ttlt_slo_ms=30, cache_salt="salt", request_id="mine", user="u",
        parallel_tool_calls=False, truncate_prompt_tokens=4, truncation_side="right"))
    assert response.status_code == 200
    request = master.requests[0]
    for name, value in fields.items():
        assert getattr(request.params, name) == value, name
    for name, value in lists.items():
        assert getattr(request.params, name) == tuple(value), name
    assert request.params.logit_bias == {9: 1.5}
    assert request.params.max_tokens == 33
    assert request.params.logprobs == 0
    assert (request.priority, request.offline, request.cache_salt) == (-2, True, "salt")
    assert (request.ttft_slo_ms, request.tpot_slo_ms, request.ttlt_slo_ms) == (10, 20, 30)
    assert request.external_id == response.json()["id"] == "chatcmpl-mine"
    assert bytes(request.prompt_token_ids) == b"<use"


@pytest.mark.parametrize("asked", [None, False, True])
async def test_the_master_knows_whether_anyone_reads_along(client, master, asked):
    await client.post(URL, json=body(stream=asked))
    assert master.streamed == [bool(asked)]


async def test_beam_search_reaches_the_engine_without_the_models_sampling(client, master):
    master.default_sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    response = await client.post(URL, json=body(use_beam_search=True, length_penalty=0.5, n=2, best_of=4))
    assert response.status_code == 200
    params = master.requests[0].params
    assert (params.use_beam_search, params.length_penalty, params.n, params.num_sequences) == (True, 0.5, 2, 4)
    assert (params.repetition_penalty, params.top_k) == (1.0, 0)


async def test_repetition_detection_and_stream_interval(client, master):
    await client.post(URL, json=body(stream=True, stream_interval=5, repetition_detection={
        "max_pattern_size": 20, "min_pattern_size": None, "min_count": 4}))
    params = master.requests[0].params
    assert params.stream_interval == 5
    assert params.repetition_detection == RepetitionDetection(max_pattern_size=20, min_count=4)


async def test_prompt_text(client, master):
    reply = (await client.post(URL, json=body(return_prompt_text=True, truncate_prompt_tokens=2))).json()
    assert reply["prompt_text"] == "<user>Hi"
    assert bytes(master.requests[0].prompt_token_ids) == b"Hi"
    sent = chunks(await stream(client, return_prompt_text=True, add_special_tokens=True))
    assert sent[0]["prompt_text"] == "<user>Hi"
    assert "prompt_token_ids" not in sent[0]
    assert all("prompt_text" not in chunk for chunk in sent[1:])
    assert "prompt_text" not in (await client.post(URL, json=body())).json()


async def test_null_means_default(client, master):
    names = ["temperature", "top_p", "n", "stop", "stream", "stream_options", "max_tokens", "logit_bias", "logprobs",
             "seed", "tools", "response_format", "chat_template_kwargs", "top_k"]
    response = await client.post(URL, json=body(**dict.fromkeys(names)))
    assert response.status_code == 200
    assert master.requests[0].params.max_tokens is None
    assert master.requests[0].params.temperature == 1.0


async def test_model_defaults_fill_what_the_request_leaves_open(client, master):
    master.default_sampling = {"temperature": 0.6, "top_k": 20.0}
    await client.post(URL, json=body(temperature=0.1))
    params = master.requests[0].params
    assert params.temperature == 0.1
    assert params.top_k == 20
    assert isinstance(params.top_k, int)


async def test_one_stop_string(client, master):
    master.script = says("x", stop_reason="\n")
    reply = (await client.post(URL, json=body(stop="\n"))).json()
    assert master.requests[0].params.stop == ("\n",)
    assert reply["choices"][0]["stop_reason"] == "\n"


async def test_template_arguments(client, master):
    await client.post(URL, json=body(chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "d"}],
                                     reasoning_effort="low", add_special_tokens=True))
    assert master.template_kwargs == {
        "add_generation_prompt": True, "continue_final_message": False, "documents": [{"text": "d"}],
        "kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    assert master.add_special_tokens is True


async def test_continued_message_keeps_its_role_and_may_be_echoed(client, master):
    messages = [*MESSAGES, {"role": "assistant", "content": "I say: "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    reply = (await client.post(URL, json={"model": "tiny", **fields})).json()
    assert reply["choices"][0]["message"]["content"] == "I say: Hello world"
    assert master.template_kwargs["add_generation_prompt"] is False
    sent = chunks(await stream(client, **fields))
    assert sent[1]["choices"][0]["delta"]["content"] == "I say: "


async def test_text_parts(client, master):
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    response = await client.post(URL, json=body(messages=[{"role": "user", "content": parts}]))
    assert response.status_code == 200


@pytest.mark.parametrize("name", [None, "", "tiny", "other"])
async def test_served_names(master, name):
    async with client_of(master, served_model_name=("tiny", "other")) as client:
        response = await client.post(URL, json={"messages": MESSAGES, "model": name})
    assert response.json()["model"] == (name or "tiny")


async def test_generated_ids_are_unique(client):
    ids = {(await client.post(URL, json=body())).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(id.startswith("chatcmpl-") for id in ids)


async def test_a_request_id_unfit_for_a_header_is_replaced(client):
    response = await client.post(URL, json=body(), headers={"X-Request-Id": "a b\tc"})
    assert response.headers["x-request-id"] != "a b\tc"
