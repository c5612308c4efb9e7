"""Structured output of a random model behind the whole server: it is random, and it has the form that was asked for."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest

from tests.support.master import Answer, prompt_of, running_master
from tests.support.tiny_model import make_tiny_model
from xllm_npu.text import structured_output

pytestmark = pytest.mark.multiprocess

MESSAGES = [{"role": "user", "content": "Invent somebody."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
                   "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "somebody", "strict": True, "schema": SCHEMA}}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}


def check(text: str) -> None:
    import jsonschema

    jsonschema.validate(json.loads(text), SCHEMA)


def test_chat_answers_in_the_schema(openai_client: openai.OpenAI):
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 600, "temperature": 1.0, "response_format": FORMAT}
    reply = openai_client.chat.completions.create(**ask, n=4, seed=1)
    assert {c.finish_reason for c in reply.choices} == {"stop"}
    for choice in reply.choices:
        check(choice.message.content)
    assert len({c.message.content for c in reply.choices}) > 1
    [alone] = openai_client.chat.completions.create(**ask, seed=1).choices
    chunks = openai_client.chat.completions.create(**ask, seed=1, stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == alone.message.content == reply.choices[0].message.content


def test_completions_of_many_forms_at_once(openai_client: openai.OpenAI):
    import concurrent.futures

    forms = {
        r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)": {"regex": r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)"},
        "yes|no|maybe": {"choice": ["yes", "no", "maybe"]}, r"\{.*": COMPACT,
        r"(\d+ ){1,6}end": {"grammar": 'root ::= (num " "){1,6} "end"\nnum ::= [0-9]{1,3}'}, "plain": None,
    }  # fmt: skip

    def ask(pattern: str) -> tuple[str, str]:
        extra = {"structured_outputs": forms[pattern]} if forms[pattern] else {}
        reply = openai_client.completions.create(
            model="tiny", prompt="x", max_tokens=300 if extra else 5, temperature=0.7, extra_body=extra)
        return pattern, reply.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        for pattern, text in pool.map(ask, [*forms] * 4):
            assert pattern == "plain" or re.fullmatch(pattern, text, re.S), f"{text!r} is no {pattern}"


def bad_forms() -> list[tuple[str, dict]]:
    """A hundred, each with the field that is at fault."""
    name = "structured_outputs"
    forms: list[tuple[str, dict]] = []
    for i in range(25):
        forms.append((f"{name}.regex", {name: {"regex": "(" * (i + 1) + "a" + ")" * i}}))
        forms.append((f"{name}.grammar", {name: {"grammar": f"start: rule{i}"}}))
        keyword = ["not", "if", "contains", "uniqueItems", "propertyNames"][i % 5]
        schema = {"type": "array", "items": {keyword: True, "title": str(i)}}
        forms.append(("response_format", {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": schema}}}))
        forms.append((f"{name}.json", {name: {"json": {"allOf": [{"anyOf": [
            {"properties": {f"p{k}{i}": {"const": j}}, "required": [f"p{k}{i}"]} for j in range(3)]}
            for k in range(12)]}}}))
    return forms


def test_a_hundred_bad_forms_are_refused_and_the_server_answers_on(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for field, form in bad_forms():
            reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 5, **form})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == field
        good = {"model": "tiny", "prompt": "x", "max_tokens": 5, "structured_outputs": {"choice": ["good"]}}
        assert client.post("/v1/completions", json=good).json()["choices"][0]["text"] == "good"


def test_the_python_api_takes_a_grammar(tiny_dir):
    from xllm_npu import LLM, SamplingParams

    params = SamplingParams(max_tokens=50, grammar=structured_output.regex(r"\d{4}-\d{2}"), seed=1)
    bad = SamplingParams(max_tokens=50, grammar=structured_output.lark("start: nothing"))
    with LLM(str(tiny_dir), dtype="float32", num_threads=1, max_cache_size="20MiB", block_size=16) as llm:
        good, refused = llm.generate(["a", "b"], [params, bad], use_tqdm=False)
    assert re.fullmatch(r"\d{4}-\d{2}", good.outputs[0].text)
    assert "nothing" in refused.error


@pytest.mark.slow
async def test_ranks_that_step_together(tmp_path):
    """Experts over two data-parallel ranks: while one compiles a grammar, the other's steps go on."""
    model = make_tiny_model(tmp_path / "moe", "qwen3_moe")
    grammar = structured_output.regex("[a-f]{6}-[0-9]{3}")
    async with running_master(model, dp_size=2) as master:
        answers = [Answer(master, prompt_of(9 + i, i), 40, grammar=grammar if i % 2 else None) for i in range(8)]
        for i, answer in enumerate(answers):
            text = master.tokenizer.decode(await answer.whole())
            if i % 2:
                assert re.fullmatch("[a-f]{6}-[0-9]{3}", text), text
            else:
                assert answer.count == 40
