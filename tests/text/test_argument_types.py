"""Bare text to JSON values by a schema, and JSON found in text that comes in pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.text.argument_types import arguments_object, typed, types_of
from xllm_npu.text.json_scanner import MAX_DEPTH, JsonScanner, dumped, strict_text

ROOT = {"$defs": {"n": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "boolean"}]},
                  "chain": {"$ref": "#/$defs/chain"}}}


@pytest.mark.parametrize(("text", "schema", "value"), [
    ("3", {"type": "string"}, "3"),
    ("null", {"type": "string"}, "null"),
    ("null", {"type": ["string", "null"]}, None),
    ("3", {"type": "integer"}, 3),
    (" 3\n", {"type": "integer"}, 3),
    ("3.0", {"type": "integer"}, 3.0),
    ("3.5", {"type": "integer"}, "3.5"),
    ("1e3", {"type": "integer"}, 1000.0),
    ("007", {"type": "integer"}, "007"),
    ("3", {"type": "number"}, 3),
    ("+3", {"type": "number"}, 3.0),
    ("1e999", {"type": "number"}, float("inf")),
    ("12345678901234567890123", {"type": "integer"}, 12345678901234567890123),
    ("1_000", {"type": "integer"}, "1_000"),
    ("True", {"type": "boolean"}, True),
    ("FALSE", {"type": "boolean"}, False),
    ("yes", {"type": "boolean"}, "yes"),
    ("None", {"type": "null"}, None),
    ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ('{"a": ', {"type": "object"}, '{"a": '),
    ("[1]", {"type": "object"}, "[1]"),
    ("[1, 2]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, [1, 2]),
    ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
    ("five", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five"),
    ("5", {"$ref": "#/$defs/n"}, 5),
    ("true", {"$ref": "#/$defs/loop"}, True),
    ("5", {"$ref": "#/$defs/chain"}, 5),
    ("5", {"$ref": "http://elsewhere/"}, 5),
    ("2", {"enum": [1, 2]}, 2),
    ("2", {"enum": ["1", "2"]}, "2"),
    ("2", {"const": "2"}, "2"),
    ("5", {}, 5),
    ("five", {}, "five"),
    ('"five"', {}, '"five"'),
    ("5", "no schema", 5),
    ("5", None, 5),
])
def test_the_type_is_the_schemas(text, schema, value):
    result = typed(text, schema, ROOT)
    assert json.loads(result) == value
    assert type(json.loads(result)) is type(value)


def test_an_object_of_typed_values():
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    assert arguments_object([("a", "1"), ("b", "1"), ("c", "[]"), ("a", "2")], schema) == '{"a": 2, "b": "1", "c": []}'
    assert arguments_object([], {"properties": "wrong"}) == "{}"


def test_a_schema_that_refers_to_itself_many_times_is_looked_at_once():
    root = {"anyOf": [{"$ref": "#"}] * 2000}
    assert types_of(root, root) == set()


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                      | st.text(max_size=6), lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v,
                                                                                             max_size=3), max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii=st.booleans(),
       cuts=st.lists(st.integers(0, 80), max_size=5))
def test_a_value_ends_where_it_ends(value, indent, ascii, cuts):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    whole = text + " rest"
    at = sorted({c % len(whole) for c in cuts})
    scanner, used = JsonScanner(), 0
    for a, b in zip([0, *at], [*at, len(whole)]):
        if not scanner.done and not scanner.failed:
            used += scanner.feed(whole[a:b])
    assert scanner.done
    assert whole[:used] == scanner.text == text


@settings(max_examples=150, deadline=None)
@given(text=st.text('{}[]",:\\u0 a1-.eE+\n\ttrufalsn', max_size=12))
def test_what_is_json_is_what_python_says(text):
    try:
        value = json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        assert strict_text(text) is None
    else:
        found = strict_text(text)
        assert found is not None
        assert json.loads(found) == value


def test_depth():
    assert strict_text("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert strict_text("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


def test_half_a_surrogate_pair_can_be_sent():
    assert dumped("é\ud800").encode()
    assert dumped("é") == '"é"'


def test_values_of_the_outermost_object_are_found():
    scanner = JsonScanner()
    text = '{"a": {"a": [1]}, "b" : "x}" ,"c":-1.5e3}'
    assert scanner.feed(text) == len(text)
    found = {key: text[a:b] for key, (a, b) in scanner.spans().items()}
    assert found == {"a": '{"a": [1]}', "b": '"x}"', "c": "-1.5e3"}
