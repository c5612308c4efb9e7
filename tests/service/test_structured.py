"""`response_format` and `structured_outputs` of both APIs: the grammar that reaches the engine, and what is refused."""

import json

import pytest

from tests.service.fake_master import accepts, output, says
from xllm_npu.state.output import GRAMMAR_TOO_COMPLEX, SequenceDelta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def body(path: str, **fields) -> dict:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {"model": "tiny", **prompt, **fields}


ASKED = [
    ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a<|im_start|>b"}}},
     ["a<|im_start|>b"], ["a", "ab"]),
    ({"response_format": {"type": "json_object"}}, ['{"x": [1]}'], ["[]", "3"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
     ['{"a": 3}', '{\n  "a": 3\n}'], ['{"a": "3"}', "{}"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ['{"b": null}'], ["1"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 3}'], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, ['{"a":3}'], ['{"a": 3}']),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]{2}"}}, ['{  "a"  :  3  }'], ['{ "a":3}']),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"regex": r"^\d{3}/[a-c]+$"}}, ["123/abc"], ["12/abc", "123/"]),
    ({"structured_outputs": {"choice": ["yes", 'n"o', "no", "yes"]}}, ["yes", 'n"o'], ["n", "yesno"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+ | "b"'}}, ["a12", "b"], ["a", "bb"]),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]+/'}}, ["a12"], ["a"]),
    ({"structured_outputs": {"structural_tag": json.dumps({
        "type": "structural_tag", "triggers": ["<f="], "structures": [
            {"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<f=two>", "schema": {}, "end": ""}]})}},
     ["hello", 'a <f=one>{"a": 1}</f> b <f=two>[2]', ""], ["<f=three>", '<f=one>{"b": 1}</f>', "<f=one>"]),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "good", "bad"), ASKED)
async def test_what_is_asked_for_reaches_the_engine_as_a_grammar(client, master, path, fields, good, bad):
    reply = await client.post(path, json=body(path, **fields))
    assert reply.status_code == 200, reply.text
    grammar = master.requests[-1].params.grammar
    assert master.grammars.checked[-1][0] == grammar
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nothing_asked_for_is_no_grammar(client, master, path):
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
                   {"structured_outputs": None}, {"structured_outputs": {"json_object": False}},
                   {"guided_json": SCHEMA}, {"guided_regex": "a"}, {"guided_choice": ["a"]}):
        reply = await client.post(path, json=body(path, **fields))
        assert reply.status_code == 200, reply.text
        assert master.requests[-1].params.grammar is None
    assert master.grammars.checked == []


BIG = "x" * 70000
REFUSED = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "contains": 1}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300000]}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token", "token": 3}}}, "response_format"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": BIG}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": [str(i) for i in range(5000)]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [BIG]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": BIG}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": " " * 300000 + "{}"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": [1] * 300000}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"properties": {str(i): {} for i in range(80000)}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": ["\u0001" * 100000]}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "https://example.com/x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x" * 101}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "x", "end": ""}]}}},
     "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_cannot_be_used_is_refused_by_name(client, master, path, fields, param):
    reply = await client.post(path, json=body(path, **fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert len(reply.text) < 1500
    assert not master.requests


async def test_a_queue_of_grammars_is_said_to_be_one(client, master):
    master.grammars.busy = True
    reply = await client.post(CHAT, json=body(CHAT, response_format={"type": "json_object"}))
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert reply.json()["error"]["code"] == "grammars_busy"


async def test_the_text_comes_back_as_it_is(client, master):
    master.script = says('{"a"', ": 3}")
    reply = await client.post(CHAT, json=body(CHAT, response_format={"type": "json_object"}))
    assert reply.json()["choices"][0]["message"]["content"] == '{"a": 3}'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(client, master, path):
    async def script(request):
        yield output(request, SequenceDelta(0, "x", [1]))
        yield output(request, finished=True, error=GRAMMAR_TOO_COMPLEX)

    master.script = script
    fields = {"structured_outputs": {"regex": "x+"}}
    reply = await client.post(path, json=body(path, **fields))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "grammar_too_complex")
    reply = await client.post(path, json=body(path, stream=True, **fields))
    assert '"code":"grammar_too_complex"' in reply.text
