"""Bodies that a server must survive: good ones of every route, and what a seeded generator makes of them.

`broken(rng, body)` is the body as bytes: values of wrong types, beyond every limit or deeply nested, fields nobody
knows, text that is no Unicode, numbers that are none, JSON that is none.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

Json = Any
USER = {"role": "user", "content": "Hello"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CHAT = {
    "model": "tiny", "max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 2, "stop": ["xyz"],
    "logprobs": True, "top_logprobs": 2, "logit_bias": {"65": 1.0}, "bad_words": ["bad"], "stop_token_ids": [3],
    "allowed_token_ids": list(range(30, 200)), "stream": False, "stream_options": None, "user": "u",
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 4}, "cache_salt": "s",
    "messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": [
        {"type": "text", "text": "a"}], "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "r"}],
    "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "chat_template_kwargs": {"a": 1}, "documents": [{"title": "t", "text": "x"}], "reasoning_effort": "low",
}  # fmt: skip
COMPLETION = {
    "model": "tiny", "prompt": "Hello", "max_tokens": 8, "n": 2, "best_of": 3, "echo": True, "logprobs": 2,
    "prompt_logprobs": 1, "truncate_prompt_tokens": 4, "stop": ["x"], "min_tokens": 1, "top_k": 5, "priority": 1,
    "use_beam_search": False, "structured_outputs": {"regex": "[ab]{3}"}, "frequency_penalty": 0.1,
}  # fmt: skip
MESSAGES = {
    "model": "tiny", "max_tokens": 8, "system": [{"type": "text", "text": "s"}], "top_k": 3, "stop_sequences": ["x"],
    "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"},
}  # fmt: skip
RESPONSES = {
    "model": "tiny", "max_output_tokens": 8, "instructions": "i", "store": True, "previous_response_id": None,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
              {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
              {"type": "function_call_output", "call_id": "1", "output": "r"}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "include": [], "temperature": 0.1,
}  # fmt: skip
POSTS: tuple[tuple[str, Json], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/v1/messages/count_tokens", {"messages": [USER], "tools": MESSAGES["tools"], "system": "s"}),
    ("/v1/chat/completions/batch", {"messages": [[USER], [USER]], "max_tokens": 4, "temperature": 0}),
    ("/tokenize", {"model": "tiny", "prompt": "Hello", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "add_generation_prompt": True, "tools": CHAT["tools"]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/embeddings", {"model": "embedder", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
    ("/pooling", {"model": "embedder", "input": [[65, 66]], "task": "embed", "truncate_prompt_tokens": 1}),
    ("/classify", {"model": "scorer", "input": "a", "activation": True}),
    ("/v1/score", {"model": "scorer", "text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/rerank", {"model": "scorer", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/invocations", {"model": "tiny", "prompt": "Hello", "max_tokens": 4}),
    ("/v2/embed", {"model": "embedder", "texts": ["a"], "input_type": "query", "embedding_types": ["float"]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc", "load_inplace": False}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
)  # fmt: skip
JUNK: tuple[Json, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**70, 10**400, 1.5, -0.0, 1e-320, 1e308, math.nan,
    math.inf,
    "", " ", "x", "\0", "\x1b[31m\r\n", "é✓🎉" * 50, "\ud800", "a\udfffb", "\u202e", "\ufeff", "0", "1e5", "null",
    "auto",
    "https://169.254.169.254/", "data:image/png;base64,AAAA", "../../../etc/passwd", "{{ 7*7 }}", "<|im_end|>" * 40,
    [], {}, [[]], [None], [[], {}], {"": ""}, {"a": None}, {"type": "text"}, {"type": 5}, {"type": "image_url"},
    {"type": "function"}, {"role": "user"}, {"$ref": "#"}, ["x"] * 300, [0] * 5000, [-1, 2**40], ["\ud800"],
)  # fmt: skip
LENGTHS = (15, 16, 17, 64, 65, 128, 129, 256, 257, 1024, 1025, 4096, 4097, 65536, 65537)


def paths(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value has parts."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from paths(part, (*path, key))


def deep(rng: random.Random) -> Json:
    value: Json = 1
    for _ in range(rng.choice((20, 31, 32, 33, 63, 64, 65, 200, 400))):
        value = {"a": value} if rng.random() < 0.5 else [value]
    return value


def long(rng: random.Random) -> Json:
    count, part = rng.choice(LENGTHS), rng.choice(JUNK[18:30])
    kind = rng.randrange(3)
    if kind == 0:
        return "a" * count if rng.random() < 0.5 else (str(part) or "b") * (count // 8)
    if kind == 1:
        return [copy.deepcopy(rng.choice((part, i, USER, "ab"))) for i in range(count)]
    return {f"{part}{i}": rng.choice((i, part)) for i in range(min(count, 5000))}


def mutated(rng: random.Random, body: Json) -> Json:
    """One to three of its parts changed, taken away, doubled or added to."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        where = rng.choice(list(paths(body)) or [()])
        if not where:
            return rng.choice(JUNK)
        node = body
        for key in where[:-1]:
            node = node[key]
        kind, key = rng.random(), where[-1]
        if kind < 0.15:
            del node[key]
        elif kind < 0.7:
            node[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind < 0.8:
            node[key] = long(rng)
        elif kind < 0.85:
            node[key] = deep(rng)
        elif isinstance(node, list):
            node += [node[key]] * rng.choice((1, 20, 1100))
        else:
            node[rng.choice(("unknown", "", "\ud800", "guided_json", "prompt_embeds", "stream", "n", "echo"))] = (
                copy.deepcopy(rng.choice(JUNK)))
    return body


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _spoilt(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"}", b'"', b"\\u", b"\x1b",
                                   b"\n")) + data[at:]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if out:
            out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


SPOILERS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut, _spoilt, _flipped,
    lambda rng, data: b"\xef\xbb\xbf" + data,
    lambda rng, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, data: data + data,
    lambda rng, data: b"[" * rng.choice((65, 5000, 200_000)),
    lambda rng, data: b'{"a":' * rng.choice((65, 5000, 100_000)) + b"1",
    lambda rng, data: b'{"n": ' + b"9" * rng.choice((30, 5000, 200_000)) + b"}",
    lambda rng, data: b'{"prompt": "x", "temperature": 1e' + b"9" * rng.choice((3, 400)) + b"}",
    lambda rng, data: b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 2}',
    lambda rng, data: b'{"prompt": "' + b"a" * rng.choice((100_000, 1_048_000, 1_048_576, 1_100_000)) + b'"}',
    lambda rng, data: b'{"messages": [' + b",".join([b"{}"] * 30_000) + b"]}",
    lambda rng, data: b'{"prompt": [' + b",".join([b"1"] * 100_000) + b"]}",
    lambda rng, data: b'{' + b",".join(b'"k%d": 1' % i for i in range(30_000)) + b"}",
    lambda rng, data: b"", lambda rng, data: b" " * 5000, lambda rng, data: b"null", lambda rng, data: b"NaN",
    lambda rng, data: bytes(rng.randrange(256) for _ in range(rng.choice((1, 100, 3000)))),
)  # fmt: skip


def broken(rng: random.Random, body: Json) -> bytes:
    """Mostly JSON with wrong parts, at times no JSON. Half of them ask for a stream."""
    body = mutated(rng, body) if rng.random() < 0.9 else copy.deepcopy(body)
    if isinstance(body, dict) and rng.random() < 0.4:
        body["stream"] = True
    data = json.dumps(body, ensure_ascii=True).encode()
    return rng.choice(SPOILERS)(rng, data) if rng.random() < 0.2 else data
