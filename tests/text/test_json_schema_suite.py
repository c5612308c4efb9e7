"""The official JSON Schema tests: a schema is refused, or kept to. A few of our own each time, all in the full run."""

from __future__ import annotations

import pytest

from benchmarks import json_schema_suite
from benchmarks.json_schema_suite import Case, Judge

# Files of the suite of which something is let through; docs/structured-output.md says what.
KNOWN = {
    "multipleOf", "optional/content", "optional/ecmascript-regex", "optional/format/date", "optional/format/date-time",
    "optional/format/time",
}  # fmt: skip

ACCEPTED = [
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 20}, [3, 19], [2, 20, 3.5, "3"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd", 12]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b", "aab"]),
    ({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ({"enum": ["a", 1, None, {"b": []}]}, ["a", 1, None, {"b": []}], ["b", 2, {}]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[True], [True, False]],
     [[], [1], [True, True, True]]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[1, 2], [1], []], [[2], [1, 2, 3]]),
    ({"properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": {"type": "integer"}},
     [{"a": None}, {"a": None, "b": 3}], [{}, {"a": 1}, {"a": None, "b": "3"}]),
    ({"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False, "type": "object"}},
      "$ref": "#/$defs/n"}, [{}, {"n": {"n": {}}}], [{"n": 1}, {"n": {"m": {}}}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [3, "a"], ["ab", 1.5]),
    ({"allOf": [{"minimum": 3}, {"maximum": 4}, {"type": "integer"}]}, [3, 4], [2, 5]),
    ({"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
                 "required": ["kind", kind], "additionalProperties": False} for kind in ("cat", "dog")]},
     [{"kind": "cat", "cat": 1}, {"kind": "dog", "dog": 2}], [{"kind": "cat", "dog": 1}, {"kind": "cow"}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize(("schema", "valid", "invalid"), ACCEPTED)
def test_what_is_accepted_is_kept_to(judge, schema, valid, invalid):
    tests = [{"data": x, "valid": True, "description": ""} for x in valid]
    tests += [{"data": x, "valid": False, "description": ""} for x in invalid]
    verdict = judge.judge(Case("draft2020-12", "own", "", schema, tests))
    assert (verdict.refused, verdict.lax, verdict.narrow) == ("", [], 0)
    assert verdict.checked > len(invalid), "nothing was written at random"


@pytest.mark.parametrize("keyword", [
    {"not": {"type": "integer"}}, {"uniqueItems": True}, {"contains": {"const": 1}}, {"minContains": 2},
    {"propertyNames": {"maxLength": 3}}, {"dependentRequired": {"a": ["b"]}}, {"if": {"const": 1}},
    {"unevaluatedProperties": False}, {"unevaluatedItems": False}, {"$dynamicRef": "#x"},
    {"oneOf": [{"minimum": 1}, {"maximum": 3}]}, {"format": "json-pointer", "type": "string"}])  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_by_name(judge, keyword):
    verdict = judge.judge(Case("draft2020-12", "own", "", keyword, []))
    assert next(iter(keyword)) in verdict.refused or "Unknown format: json-pointer" in verdict.refused


def test_the_judge_sees_what_is_let_through(judge):
    """Had the matcher been more lax than the schema, it would be told."""
    tests = [{"data": 3, "valid": False, "description": "wrong on purpose"}]
    verdict = judge.judge(Case("draft2020-12", "own", "", {"type": "integer"}, tests))
    assert len(verdict.lax) == 1
    assert "wrong on purpose" in verdict.lax[0]


@pytest.mark.slow
def test_the_whole_suite(tmp_path):
    rows = json_schema_suite.judge_all(json_schema_suite.fetch(tmp_path), json_schema_suite.DRAFTS)
    assert {keyword for keyword, row in rows.items() if row.lax} <= KNOWN, [
        (case.draft, keyword, text) for keyword, row in rows.items() if keyword not in KNOWN for case, text in row.lax]
    assert sum(row.accepted for row in rows.values()) > 900
    assert all(reason for row in rows.values() for reason in row.reasons)
