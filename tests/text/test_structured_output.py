"""Grammars and their matchers, with the tokens of the tiny model: bytes, and a few that are no text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import GrammarError, MatcherFactory

BACKEND = byte_tokenizer()
BACKEND.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
BACKEND.add_tokens([AddedToken("[CALL]", special=False, normalized=False)])
BACKEND.add_special_tokens([AddedToken("</think>", special=True, normalized=False)])
EOS_ID = BACKEND.token_to_id(EOS)
MARKERS = {"<tool_call>": BACKEND.token_to_id("<tool_call>"), "</think>": BACKEND.token_to_id("</think>")}


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(BACKEND.to_str(), 300, [EOS_ID, 256])


def ids(text: str) -> list[int]:
    """Letter by letter, whatever tokens the text might be."""
    return byte_tokenizer().encode(text).ids


def allowed(matcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(matcher, *parts: str | int) -> bool:
    tokens = [t for part in parts for t in (ids(part) if isinstance(part, str) else [part])]
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def write(matcher, rng: np.random.Generator, most: int = 400) -> list[int]:
    """Tokens that the matcher allows, at random; the longer it lasts the likelier those that end things."""
    out: list[int] = []
    closing = {t for c in '"}]' for t in ids(c)} | {EOS_ID}
    while len(out) < most:
        choices = allowed(matcher)
        assert choices, "nothing is allowed"
        ends = [t for t in choices if t in closing]
        token = int(rng.choice(ends if ends and rng.uniform() < len(out) / 60 else choices))
        assert matcher.consume_token(token), f"{token} was allowed and is not taken: {matcher.get_error()}"
        if token in (EOS_ID, 256):
            return out
        out.append(token)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("text", ["<|im_end|>", "<tool_call>", "</think>", "[CALL]", "<｜x｜>"])
def test_text_that_looks_like_a_token_can_be_written(factory, text):
    """What a schema demands literally must be possible to write, be it the name of a special token."""
    grammar = structured_output.json_schema({"const": {"a": text}})
    written = write(factory.matcher(grammar), np.random.default_rng(0))
    assert json.loads(BACKEND.decode(written, skip_special_tokens=False)) == {"a": text}
    grammar = structured_output.choice([text, "x"])
    assert accepts(factory.matcher(grammar), text) or BACKEND.token_to_id(text) is not None


def test_markers_are_tokens(factory):
    lark = f"start: {structured_output.marked('<tool_call>', MARKERS)} {structured_output.marked('[CALL]', MARKERS)}"
    matcher = factory.matcher(structured_output.lark(lark))
    assert allowed(matcher) == [MARKERS["<tool_call>"]]
    assert accepts(matcher, MARKERS["<tool_call>"], "[CALL]")


@pytest.mark.parametrize(("marker", "written"), [("</think>", MARKERS["</think>"]), ("END", "END")])
def test_after_reasoning(factory, marker, written):
    answer = structured_output.json_schema({"type": "integer"})
    grammar = structured_output.after_reasoning(answer, marker, MARKERS)
    assert accepts(factory.matcher(grammar), 'I think {"x', written, "\n\n42")
    assert accepts(factory.matcher(grammar), written, "42")
    assert not accepts(factory.matcher(grammar), "42")
    matcher = factory.matcher(grammar)
    assert not matcher.is_accepting()
    assert EOS_ID not in allowed(matcher)
    assert not accepts(factory.matcher(grammar), "so", written, "no")


def test_after_reasoning_keeps_grammars_that_refer_to_others(factory):
    grammar = json.dumps({"grammars": [
        {"name": "first", "lark_grammar": "start: @other \"!\""}, {"name": "other", "json_schema": {"const": 1}}]})
    assert accepts(factory.matcher(structured_output.after_reasoning(grammar, "END", {})), "x END 1!")


def test_blanks_between_the_parts_of_json_are_bounded(factory):
    matcher = factory.matcher(structured_output.json_object())
    assert matcher.consume_tokens(ids("{" + " " * 64))
    assert ids(" ")[0] not in allowed(matcher)


def test_a_model_without_an_end_has_no_grammars():
    with pytest.raises(GrammarError, match="end-of-sequence"):
        MatcherFactory(BACKEND.to_str(), 300, [])


def test_logits_narrower_than_the_tokenizer(factory):
    narrow = MatcherFactory(BACKEND.to_str(), 200, [EOS_ID])
    assert narrow.vocab_size == BACKEND.get_vocab_size()
    assert allowed(narrow.matcher(structured_output.regex("a"))) == ids("a")


def test_only_text_is_allowed_where_text_is_free(factory):
    tokens = allowed(factory.matcher(structured_output.regex("(.|\n)*")))
    assert {EOS_ID, 256} <= set(tokens)
    assert {BACKEND.token_to_id(t) for t in ("<|im_start|>", "<|pad|>", *MARKERS)}.isdisjoint(tokens)


WORDS = {
    "type": "object", "required": ["name of the dog", "quick brown fox"], "additionalProperties": False,
    "properties": {"name of the dog": {"type": "string", "maxLength": 20},
                   "quick brown fox": {"enum": ["jumps over", "lazy </s> dog", "Grüße 你好"]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_every_kind_of_tokenizer_writes_what_is_forced(tokenizers, kind):
    """Where a tokenizer puts blanks before texts, forced text must not get them."""
    tokenizer = tokenizers[kind]
    made = MatcherFactory(tokenizer.to_json(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    grammar = structured_output.json_schema(WORDS)
    for seed in range(8):
        matcher, rng, out = made.matcher(grammar), np.random.default_rng(seed), []
        while not out or out[-1] != tokenizer.eos_token_id:
            out.append(int(rng.choice(allowed(matcher))))
            assert matcher.consume_token(out[-1]), f"{tokenizer.token_text(out[-1])!r} was allowed and is not taken"
        assert set(json.loads(tokenizer.decode(out))) == set(WORDS["required"])


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "no_decoder"])
def test_a_tokenizer_whose_bytes_are_unknown_is_refused(tokenizers, kind):
    tokenizer = tokenizers[kind]
    with pytest.raises(GrammarError, match="does not work with the model's tokenizer"):
        MatcherFactory(tokenizer.to_json(), tokenizer.vocab_size, [tokenizer.eos_token_id])


def test_common_words_stay_whole(tokenizers):
    """What is forced comes in the tokens that the model knows it by, not in letters."""
    tokenizer = tokenizers["byte_level"]
    made = MatcherFactory(tokenizer.to_json(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    matcher, out = made.matcher(structured_output.choice(["The quick brown fox"])), []
    while not matcher.is_stopped():
        [token] = allowed(matcher)
        matcher.consume_token(token)
        out.append(token)
    assert out == tokenizer.encode("The quick brown fox", False)
    assert len(out) < len("The quick brown fox")


LEAVES = st.sampled_from([
    {"type": "integer"}, {"type": "integer", "minimum": -3, "maximum": 40}, {"type": "boolean"}, {"type": "null"},
    {"type": "string", "maxLength": 6}, {"type": "string", "pattern": "^[ab]{1,3}$"}, {"enum": ["x", 1, None, [2]]},
    {"const": {"k": ["<|im_end|>"]}}, {"type": "number", "minimum": 0, "maximum": 1}, {"type": ["integer", "null"]},
    {"type": "string", "format": "date"},
])  # fmt: skip


def _deeper(inner):
    properties = st.dictionaries(st.sampled_from(["a", "b", "long name", "ü"]), inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda p, some: {"type": "object", "properties": p, "additionalProperties": False,
                                   "required": sorted(p)[:some]}, properties, st.integers(0, 3)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(LEAVES, _deeper, max_leaves=5), seed=st.integers(0, 2**31))
def test_what_is_written_at_random_under_a_schema_is_valid(factory, schema, seed):
    import jsonschema

    written = write(factory.matcher(structured_output.json_schema(schema)), np.random.default_rng(seed), 3000)
    jsonschema.validate(json.loads(bytes(BACKEND.decode(written), "utf-8")), schema)


def test_as_many_choices_as_are_allowed_can_all_be_written(factory):
    options = [f"c{i}" for i in range(structured_output.MAX_CHOICES)]
    grammar = structured_output.choice(options)
    matcher = factory.matcher(grammar)
    for token in ids("c40"):
        assert token in allowed(matcher)
        assert matcher.consume_token(token)
    assert EOS_ID in allowed(matcher)
    assert set(ids("0123456789")) <= set(allowed(matcher))
    assert all(accepts(factory.matcher(grammar), option) for option in options[::97])
    assert not accepts(factory.matcher(grammar), f"c{len(options)}")
    assert accepts(factory.matcher(structured_output.choice(["", "a"])))
