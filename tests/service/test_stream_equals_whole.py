"""An answer that is streamed says what the whole one says, in all three chat APIs, however its text is cut."""

import itertools
import json

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, output, position
from xllm_npu.state.output import SequenceDelta
from xllm_npu.text.output_format import ModelHints, output_format

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> \\"x\\""}}\n</tool_call>'
FRAGMENTS = ("Hello ", "\n", " ", "you", "<", "<tool", "</tool_call>", CALL, CALL.replace('"f"', '"g"'), CALL[:30],
             '{"name": "f", "arguments": {}}', '```json\n{"name": "g", "arguments": {"b": 1}}\n```', "<tool_call>{]",
             "</think>", "<think>", "é✓")
STARTS = ("", "<think>\nHm.\n</think>\n\n", "<think>", "Hm.</think>", "\n\n")
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int], str]:
    """A text, where it is cut into deltas, and how it ends: by itself, by a stop string anywhere, or by length."""
    text = draw(st.sampled_from(STARTS)) + "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=6)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    step = draw(st.sampled_from((1, 2, 7, 1000)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=8)) if step == 1000 else list(range(0, len(text), step))
    return text, sorted({0, len(text), *cuts}), draw(st.sampled_from(("stop", "length", "abort", "###")))


def master_that_says(answers: list, prompt_end: str) -> FakeMaster:
    """Every sequence says its answer: piece by piece where somebody reads along, else all at once."""

    async def script(request):
        streams = master.streamed[-1]
        pieces = []
        for index, (text, cuts, end) in enumerate(answers):
            spans = list(itertools.pairwise(cuts)) if streams else [(0, len(text))]
            for i, (start, stop) in enumerate(spans or [(0, 0)]):
                last = i == max(0, len(spans) - 1)
                ids = [ord(c) % 256 for c in text[start:stop]]
                reason = ("stop" if end == "###" else end) if last else None
                logprobs = None
                if request.params.logprobs is not None:
                    logprobs = [position(t, start + k) for k, t in enumerate(ids)]
                pieces.append((i, SequenceDelta(index, text[start:stop], ids, logprobs, reason,
                                                "###" if last and end == "###" else None)))
        pieces.sort(key=lambda piece: piece[0])  # the sequences take turns
        for i, (_, delta) in enumerate(pieces):
            yield output(request, delta, generated=sum(len(t) for t, _, _ in answers), finished=i == len(pieces) - 1)

    master = FakeMaster(script)
    master.prompt_end = prompt_end
    master.output_format = output_format("hermes", "qwen3", ModelHints())
    return master


async def both(client: httpx.AsyncClient, url: str, body: dict) -> tuple[dict, list[dict]]:
    whole = await client.post(url, json=body)
    streamed = await client.post(url, json={**body, "stream": True})
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    data = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    return whole.json(), list(map(json.loads, data))


def folded_choices(chunks: list[dict], n: int) -> list[dict]:
    choices = [{"content": "", "reasoning": "", "calls": [], "logprobs": [], "token_ids": []} for _ in range(n)]
    for chunk in chunks:
        for one in chunk["choices"]:
            choice, delta = choices[one["index"]], one["delta"]
            assert "finish_reason" not in choice  # nothing comes after the end
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(choice["calls"])
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["logprobs"] += (one["logprobs"] or {"content": []})["content"]
            choice["token_ids"] += one.get("token_ids", [])
            if one["finish_reason"]:
                choice |= {"finish_reason": one["finish_reason"], "stop_reason": one["stop_reason"]}
    return choices


def whole_choices(reply: dict) -> list[dict]:
    result = []
    for choice in reply["choices"]:
        message = choice["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
        result.append({
            "content": message["content"] or "", "reasoning": message["reasoning"] or "", "calls": calls,
            "logprobs": choice["logprobs"]["content"], "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]})
    return result


def folded_blocks(events: list[dict]) -> list[dict]:
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    for block in blocks:
        data = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(data)
    return blocks


def nameless(items: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(sequences(), min_size=1, max_size=3), tools=st.booleans(), parallel=st.booleans(),
       prompt_end=st.sampled_from(("", "<think>\n")))
async def test_chat(answers, tools, parallel, prompt_end):
    master = master_that_says(answers, prompt_end)
    body = {"messages": [{"role": "user", "content": "x"}], "n": len(answers), "logprobs": True,
            "return_token_ids": True, "parallel_tool_calls": parallel, **({"tools": TOOLS} if tools else {})}
    async with client_of(master) as client:
        whole, chunks = await both(client, "/v1/chat/completions", body)
    assert folded_choices(chunks, len(answers)) == whole_choices(whole)


@settings(max_examples=20, deadline=None)
@given(answer=sequences(), prompt_end=st.sampled_from(("", "<think>\n")), logprobs=st.booleans())
async def test_messages_and_responses(answer, prompt_end, logprobs):
    master = master_that_says([answer], prompt_end)
    tools = [tool["function"] for tool in TOOLS]
    async with client_of(master) as client:
        whole, events = await both(client, "/v1/messages", {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "tools": tools})
        assert nameless(folded_blocks(events)) == nameless(whole["content"])
        assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        whole, events = await both(client, "/v1/responses", {
            "input": "x", "tools": [{"type": "function", **tool} for tool in tools],
            "include": ["message.output_text.logprobs"] if logprobs else []})
    last = events[-1]["response"]
    assert last["status"] == whole["status"]
    assert nameless(last["output"]) == nameless(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    text: dict[int, str] = {}
    probabilities: dict[int, list] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            text[event["output_index"]] = text.get(event["output_index"], "") + event["delta"]
            probabilities.setdefault(event["output_index"], []).extend(event.get("logprobs", ()))
    assert list(text.values()) == [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                                   for item in last["output"]]
    for index, item in enumerate(last["output"]):
        if item["type"] == "message":
            [part] = item["content"]
            assert probabilities[index] == part["logprobs"]
            if logprobs:  # of the tokens that the text is made of, which here are its characters; blanks may be dropped
                tokens = "".join(one["token"] for one in part["logprobs"])
                assert tokens.strip() == "".join(chr(ord(c) % 256) for c in part["text"]).strip()
