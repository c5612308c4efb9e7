"""Structural tags: what each format lets through, with tokens that are bytes and a few that are markers."""

from __future__ import annotations

import pytest

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import MatcherFactory

BACKEND = byte_tokenizer()
MARKERS = {"<|im_start|>": BACKEND.token_to_id("<|im_start|>")}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(BACKEND.to_str(), BACKEND.get_vocab_size(), [BACKEND.token_to_id(EOS)])


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict, end: str | list[str]) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**options) -> dict:
    tags = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", ANY, "</f>"), tag("[x]", const("y"), "")]
    return {"type": "triggered_tags", "triggers": ["<f=", "[x"], "tags": tags, **options}


def separated(**options) -> dict:
    return {"type": "tags_with_separator", "tags": [tag("<", NUMBER, ">")], "separator": ", ", **options}


FORMATS = [
    (const('a"b\n'), ['a"b\n'], ["a", 'a"b\nc']),
    (NUMBER, ["12"], ["a"]),
    ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["ab"]),
    ({"type": "grammar", "grammar": 'root ::= "x" y\ny ::= [0-9]'}, ["x1"], ["x"]),
    (ANY, ["", "any\nthing"], []),
    ({"type": "sequence", "elements": [const("n = "), NUMBER, ANY]}, ["n = 3", "n = 3 or so"], ["3", "n = x"]),
    ({"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "3"], ["no", "yes3"]),
    ({"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, {"type": "plus", "content":
      const("b")}, {"type": "star", "content": const("c")}]}, ["b", "abbcc"], ["a", "aab", "ca"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaaa"], ["a"]),
    (tag("<t>", ANY, ["</t>", "</s>"]), ["<t></t>", "<t>x</s>"], ["<t>", "<t></t>x", "x"]),
    (tag("<t>", NUMBER, "</t>"), ["<t>3</t>"], ["<t></t>"]),
    (triggered(), ["", "free", "a <f=a>3</f> b <f=b>text</f>[x]y", "</f>"],
     ["<f=c>", "<f=a>x</f>", "<f=a>3", "<f=b>open", "[xz"]),
    (triggered(at_least_one=True), ["<f=a>3</f>", "[x]y and <f=b></f> so"], ["", "a <f=a>3</f>"]),
    (triggered(stop_after_first=True), ["", "a <f=a>3</f>", "free"], ["<f=a>3</f> more", "<f=c>"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<f=a>3</f>"], ["", "<f=a>3</f><f=a>3</f>", "a"]),
    (separated(), ["", "<1>", "<1>, <2>"], ["<1><2>", "<1>, ", "x"]),
    (separated(at_least_one=True, stop_after_first=True), ["<1>"], ["", "<1>, <2>"]),
    (tag("<|im_start|>think ", ANY, "<|im_start|>"), ["<|im_start|>think so<|im_start|>"], ["<|im_start|>think so"]),
    (triggered(triggers=["<|im_start|>"], tags=[tag("<|im_start|>n", NUMBER, ".")]),
     ["free", "so <|im_start|>n12. and so"], ["<|im_start|>12.", "<|im_start|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "good", "bad"), FORMATS)
def test_each_format_lets_through_what_it_says(factory, format, good, bad):
    grammar = structured_output.structural_tag({"type": "structural_tag", "format": format}, MARKERS)

    def accepts(text: str) -> bool:
        matcher = factory.matcher(grammar)
        return matcher.consume_tokens(BACKEND.encode(text).ids) and matcher.is_accepting()

    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []


REFUSED = [
    ({"type": "token", "token": 1}, "'token', which is not supported"), ({}, "type"), ("x", "type"), (None, "type"),
    ({"type": "sequence", "elements": []}, "elements"), ({"type": "sequence", "elements": [ANY, NUMBER]}, "end"),
    ({"type": "star", "content": ANY}, "end"), ({"type": "plus", "content": triggered()}, "end"),
    ({"type": "repeat", "min": 2, "max": 1, "content": NUMBER}, "min"), ({"type": "any_text", "max_tokens": 3},
                                                                         "max_tokens"),
    ({"type": "json_schema", "json_schema": 3}, "schema"),
    ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
    (tag("a", NUMBER, 3), "end"), (tag(3, NUMBER, "a"), "begin"), (triggered(triggers=["?"]), "triggers"),
    (triggered(triggers=[3]), "triggers"), (triggered(tags=[3]), "begin"), (triggered(excludes=["x"]), "excludes"),
    ({"type": "const_string"}, "value"), ({"type": "regex", "pattern": "x" * 20000}, "characters"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "reason"), REFUSED)
def test_what_is_no_format_is_refused_by_name(format, reason):
    with pytest.raises(ValueError, match=reason):
        structured_output.structural_tag({"type": "structural_tag", "format": format})
