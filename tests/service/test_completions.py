import asyncio
import json

import httpx
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, output, says
from xllm_npu.state.output import SequenceDelta

URL = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "ab", **fields}


async def stream(client: httpx.AsyncClient, **fields: object) -> list[str]:
    response = await client.post(URL, json=body(stream=True, **fields), headers={"X-Request-Id": "r1"})
    assert response.status_code == 200
    return response.text[:-2].split("\n\n")


def choices(frames: list[str]) -> list[dict]:
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames[:-1]]


async def test_whole_reply(client, master):
    response = await client.post(URL, json=body(), headers={"X-Request-Id": "r1"})
    reply = response.json()
    assert reply.pop("created") > 1_600_000_000
    assert reply == {
        "id": "cmpl-r1", "object": "text_completion", "model": "tiny", "system_fingerprint": None,
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop",
                     "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 11, "total_tokens": 14,
                  "prompt_tokens_details": {"cached_tokens": 0}}}
    assert master.requests[0].params.max_tokens == 16


async def test_frames_byte_by_byte(client):
    frames = await stream(client)
    created = json.loads(frames[0].removeprefix("data: "))["created"]
    head = (f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"tiny",'
            '"system_fingerprint":null,"choices":[')
    assert frames == [
        head + '{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}]}',
        head + '{"index":0,"text":" world","logprobs":null,"finish_reason":null}]}',
        head + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
        "data: [DONE]"]


@pytest.mark.parametrize(("prompt", "encoded"), [
    ("ab", [[1, 97, 98]]), (["ab", "c"], [[1, 97, 98], [1, 99]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])])
async def test_forms_of_prompt(client, master, prompt, encoded):
    response = await client.post(URL, json=body(prompt=prompt, n=2))
    assert [list(r.prompt_token_ids) for r in master.requests] == encoded
    reply = response.json()
    assert [c["index"] for c in reply["choices"]] == list(range(2 * len(encoded)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, encoded))
    assert reply["usage"]["completion_tokens"] == 22 * len(encoded)


async def test_special_tokens_may_be_left_out(client, master):
    await client.post(URL, json=body(add_special_tokens=False))
    assert list(master.requests[0].prompt_token_ids) == [97, 98]


async def test_many_prompts_stream_side_by_side(client, master):
    turn = asyncio.Event()

    async def script(request):
        if request.prompt_token_ids[0] == 7:  # the first prompt waits for the second
            await turn.wait()
        yield output(request, SequenceDelta(0, chr(request.prompt_token_ids[0] + 60), [9], None, "stop"),
                     generated=1, finished=True)
        turn.set()

    master.script = script
    got = choices(await stream(client, prompt=[[7], [8]]))
    assert [(c["index"], c["text"]) for c in got] == [(1, "D"), (1, ""), (0, "C"), (0, "")]


async def test_indices_of_many_prompts_and_choices(client):
    text = dict.fromkeys(range(6), "")
    for choice in choices(await stream(client, prompt=["a", "b", "c"], n=2)):
        text[choice["index"]] += choice["text"]
    assert text == dict.fromkeys(range(6), "Hello world")


async def test_a_failure_of_one_prompt_ends_them_all(client, master):
    forever = asyncio.Event()

    async def script(request):
        if request.prompt_token_ids[0] == 8:
            yield output(request, finished=True, error="The engine failed.")
        await forever.wait()

    master.script = script
    response = await client.post(URL, json=body(prompt=[[7], [8]]))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The engine failed."
    assert master.closed == 2


async def test_a_refused_prompt_takes_back_those_before_it(client, master):
    response = await client.post(URL, json=body(prompt=["a", ""], add_special_tokens=False))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[1]"
    assert master.closed == 1


async def test_logprobs(client, master):
    master.script = says("ab", "c")
    reply = (await client.post(URL, json=body(logprobs=1))).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"], "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
        "text_offset": [0, 1, 2]}
    got = choices(await stream(client, logprobs=0))
    assert got[1]["logprobs"] == {"tokens": ["c"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [2]}


async def test_echo_with_logprobs(client, master):
    master.script = says("c")
    reply = (await client.post(URL, json=body(echo=True, logprobs=1))).json()
    choice = reply["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["\x01", "a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][-1] == 2
    got = choices(await stream(client, echo=True, logprobs=1))
    assert got[0]["text"] == "ab"
    assert got[0]["logprobs"]["tokens"] == ["\x01", "a", "b"]
    assert got[1]["logprobs"]["text_offset"] == [2]


async def test_echo_alone_scores_the_prompt(client):
    reply = (await client.post(URL, json=body(echo=True, max_tokens=0, logprobs=0))).json()
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert reply["usage"]["completion_tokens"] == 0


async def test_echo_of_truncated_ids_is_decoded(client, master):
    reply = (await client.post(URL, json=body(prompt=[97, 98, 99], echo=True, truncate_prompt_tokens=2,
                                              return_token_ids=True))).json()
    assert reply["choices"][0]["text"] == "bcHello world"
    assert reply["choices"][0]["prompt_token_ids"] == [98, 99]
    assert list(master.requests[0].prompt_token_ids) == [98, 99]


@pytest.mark.parametrize("asked", [None, False, True])
async def test_the_master_knows_whether_anyone_reads_along(client, master, asked):
    await client.post(URL, json=body(stream=asked))
    assert master.streamed == [bool(asked)]


async def test_beams_of_many_prompts_are_bounded(client, master):
    fields = {"use_beam_search": True, "best_of": 64}
    assert (await client.post(URL, json=body(prompt=["a"] * 16, **fields))).status_code == 200
    response = await client.post(URL, json=body(prompt=["a"] * 17, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert len(master.requests) == 16


async def test_prompt_logprobs(client):
    reply = (await client.post(URL, json=body(prompt_logprobs=1))).json()
    assert reply["choices"][0]["prompt_logprobs"][1]["97"]["decoded_token"] == "a"


async def test_infinite_logprobs_stay_json(client, master):
    async def script(request):
        one = says("a")(request)
        async for result in one:
            result.deltas[0].logprobs[0].chosen.logprob = float("-inf")
            yield result

    master.script = script
    reply = (await client.post(URL, json=body(logprobs=0))).json()
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_1024_prompts_are_the_most():
    master = FakeMaster(says("x"))
    async with client_of(master) as client:
        assert len((await client.post(URL, json=body(prompt=["a"] * 1024))).json()["choices"]) == 1024
        response = await client.post(URL, json=body(prompt=["a"] * 1025))
    assert response.status_code == 400
    assert "1024" in response.json()["error"]["message"]
