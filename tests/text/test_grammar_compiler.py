"""Grammars are tried out in processes of their own, which end when they take too long, too much, or too deep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text import grammar_compiler, structured_output
from xllm_npu.text.grammar_compiler import GrammarCompiler, GrammarsBusy

pytestmark = pytest.mark.multiprocess

GOOD = structured_output.regex("[a-z]{3}")


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    backend = byte_tokenizer()
    compiler = GrammarCompiler(backend.to_str, backend.get_vocab_size(), [backend.token_to_id(EOS)])
    yield compiler
    await compiler.close()


def nested(depth: int, leaf: dict | None = None) -> dict:
    schema: dict = leaf or {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _subsets(n: int) -> dict:
    """An intersection of n unions: 3 ** n branches."""
    return {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for j in range(3)]}
                      for i in range(n)]}


EXPLOSIVE = {
    "many counted": structured_output.regex("(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    "counted alternatives": structured_output.regex("((a|b|ab)*c?){500}(x|y){1,9999}"),
    "a window": structured_output.regex("(a|b)*a(a|b){60}c[ab]*(a|b){1,2000}b"),
    "unicode classes": structured_output.regex(r"(\w\W\s\S\p{L}\P{L}){400}"),
    "intersections": structured_output.json_schema(_subsets(14)),
    "a large union": structured_output.json_schema({"anyOf": [{"type": "object", "properties": {
        f"k{i}": {"type": "string", "pattern": f"^(a|b)*{i}(a|b){{9}}$"}}, "required": [f"k{i}"]}
        for i in range(200)]}),
    "deep": structured_output.json_schema(nested(60)),
    "deep lark": structured_output.lark("start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "deep regex": structured_output.regex("(" * 5000 + "a" + ")*" * 5000),
    "left recursion": structured_output.lark('start: a\na: a a | a a a | b\nb: b b | "x" | a'),
    "empty loops": structured_output.lark('start: (("a"*)*)* (("b"?)*)*'),
    "long repeats": structured_output.lark('start: ("a" | "aa" | "aaa")~1..100000'),
    "far lengths": structured_output.json_schema({"type": "string", "minLength": 100000, "maxLength": 10000000}),
    "far numbers": structured_output.json_schema({"type": "integer", "multipleOf": 999983, "minimum": -10**15}),
    "many items": structured_output.json_schema({"type": "array", "minItems": 100000, "items": nested(3)}),
    "a loop of references": structured_output.json_schema({"$ref": "#/$defs/a", "$defs": {
        "a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"$ref": "#/$defs/a"}}}),
    "doubling references": structured_output.json_schema({"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"type": "object", "properties": {"l": {"$ref": f"#/$defs/d{i + 1}"},
                                                      "r": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(40)},
        "d40": {"type": "integer"}}}),
    "patterns of one another": structured_output.json_schema({"allOf": [
        {"type": "string", "pattern": f"^(.*{c}){{6}}"} for c in "abcdefghijkl"]}),
}  # fmt: skip


REFUSED = {"intersections", "deep lark", "deep regex", "a loop of references"}  # at the least; the rest may be harmless


async def test_what_explodes_is_refused_in_time_or_is_harmless(compiler):
    """In any case there is an answer, and another grammar passes after it."""
    refused = {}
    for name, grammar in EXPLOSIVE.items():
        await compiler.check(structured_output.regex(f"{name}?"), "x")  # the process is there
        began = time.monotonic()
        try:
            await compiler.check(grammar, "response_format")
        except InvalidParameter as error:
            refused[name] = error
        took = time.monotonic() - began
        assert took < 2 * grammar_compiler.COMPILE_SECONDS, f"{name}: {took:.1f} s"
    assert refused.keys() >= REFUSED
    for error in refused.values():
        assert error.param == "response_format"
        assert error.message.startswith("response_format cannot be used: ")


async def test_a_process_that_does_not_answer_is_replaced(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.0)
    with pytest.raises(InvalidParameter, match="longer than"):
        await compiler.check(GOOD, "x")
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 20.0)
    with pytest.raises(InvalidParameter, match="longer than"):  # it is remembered
        await compiler.check(GOOD, "x")
    await compiler.check(structured_output.regex("b"), "x")


async def test_one_answer_for_all_who_ask_at_once(compiler):
    await asyncio.gather(*(compiler.check(GOOD, "x") for _ in range(20)))
    waiting = asyncio.create_task(compiler.check(structured_output.regex("c"), "x"))
    await asyncio.sleep(0)
    other = asyncio.create_task(compiler.check(structured_output.regex("c"), "x"))
    await asyncio.sleep(0)
    waiting.cancel()  # its client left
    await other
    assert waiting.cancelled()


async def test_who_waits_too_long_is_told_so(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", 0.0)
    for _ in range(grammar_compiler.PROCESSES):
        await compiler._slots.acquire()
    with pytest.raises(GrammarsBusy):
        await compiler.check(GOOD, "x")
    for _ in range(grammar_compiler.PROCESSES):
        compiler._slots.release()
    await compiler.check(GOOD, "x")  # and it is not remembered


async def test_a_lone_surrogate_is_refused(compiler):
    with pytest.raises(InvalidParameter, match="surrogate"):
        await compiler.check("\ud800", "x")


async def test_processes_end_with_the_compiler(compiler):
    await compiler.check(GOOD, "x")
    [process] = compiler._idle
    await compiler.close()
    assert process._process.returncode is not None


async def test_a_process_that_died_while_it_was_idle_blames_no_grammar(compiler):
    await compiler.check(GOOD, "x")
    [process] = compiler._idle
    process._process.kill()
    await process._process.wait()
    await compiler.check(structured_output.regex("d"), "x")
    assert process not in compiler._idle
