"""Requests of the chat APIs with parts lost, doubled or replaced by junk: answered, refused, never a server error."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, says
from xllm_npu.text.output_format import ModelHints, output_format

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
SCHEMA = {"name": "n", "schema": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"},
                     {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning": "h",
                      "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "1", "content": "r"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True,
        "include_reasoning": True, "reasoning_effort": "low", "n": 2, "stop": ["x"], "echo": True, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA}, "chat_template_kwargs": {"a": 1}},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "x"}]] * 2, "temperature": 0.5},
    "/v1/messages": {
        "max_tokens": 2000, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "top_k": 3,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                     {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                                       {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                                   "content": [{"type": "text", "text": "r"}]}]}],
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                  {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                  {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "1", "output": "r"}],
        "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", **SCHEMA}}, "reasoning": {"effort": "low"},
        "metadata": {"a": "b"}, "max_output_tokens": 5, "store": True, "include": ["x"]},
}
JUNK = [None, True, 0, -1, 2**70, 1.5, "", "x", "\u0000", "é✓" * 50, [], {}, [[]], [None], {"a": None},
        {"type": "text"}, {"type": 5}, "auto", ["x"] * 300, {"type": "function"},
        {"type": "function", "function": {"name": "f"}}]


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


def spoiled(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        *steps, last = rng.choice([*paths(body)] or [("messages",)])
        node = body
        for step in steps:
            node = node[step]
        kind = rng.random()
        if kind < 0.2:
            node.pop(last, None) if isinstance(node, dict) else node.pop(last)
        elif kind < 0.9 or isinstance(node, dict):
            node[last] = copy.deepcopy(rng.choice(JUNK))
        else:
            node.append(copy.deepcopy(rng.choice(JUNK)))
    return body


async def answers(count: int, seed: int) -> dict[tuple[str, int], int]:
    master = FakeMaster(says('<think>h</think>a<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    master.output_format = output_format("hermes", "qwen3", ModelHints())
    rng, seen = random.Random(seed), {}
    async with client_of(master, responses_store_size=5) as client:
        for _ in range(count):
            url = rng.choice(list(WHOLE))
            body = {**spoiled(rng, WHOLE[url]), "stream": rng.random() < 0.4}
            response = await client.post(url, json=body)
            assert response.status_code in (200, 400, 404), (url, body, response.text)
            assert "server_error" not in response.text, (url, body)
            assert "api_error" not in response.text, (url, body)
            seen[url, response.status_code] = seen.get((url, response.status_code), 0) + 1
    assert len(master.requests) == master.closed
    return seen


@pytest.mark.parametrize("url", WHOLE)
async def test_the_whole_ones_are_answered(master, client, url):
    master.output_format = output_format("hermes", "qwen3", ModelHints())
    assert (await client.post(url, json=WHOLE[url])).status_code == 200


async def test_some_spoiled_ones():
    seen = await answers(200, seed=1)
    assert all((url, 400) in seen for url in WHOLE)
    assert any((url, 200) in seen for url in WHOLE)


@pytest.mark.slow
async def test_many_spoiled_ones():
    await answers(6000, seed=2)
