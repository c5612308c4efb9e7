"""Stop strings are found at the same place however the text is cut up."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.text.stop_strings import StopStringMatcher, automaton

LETTERS = st.text("ab", min_size=0, max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def chunks(text: str, cuts: list[int]) -> list[str]:
    points = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[i:j] for i, j in pairwise(points)]


def run(stops: tuple[str, ...], parts: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher, shown = StopStringMatcher(stops, include), []
    for part in parts:
        shown.append(matcher.push(part))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.flush()], None


def expected(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """By find(): the stop string that is complete first, the longest of those."""
    hits = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=400)
@given(STOPS, LETTERS, st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_equals_find_for_any_chunking(stops, text, cuts, include):
    shown, stop = run(stops, chunks(text, cuts), include)
    assert ("".join(shown), stop) == expected(stops, text, include)


@given(STOPS, LETTERS)
def test_shown_text_is_never_taken_back(stops, text):
    """After each character: everything is shown but the longest end that a stop string begins with."""
    matcher, shown = StopStringMatcher(stops), ""
    for i, c in enumerate(text, 1):
        shown += matcher.push(c)
        if matcher.matched is not None:
            return
        held = max((n for s in stops for n in range(1, len(s)) if text[:i].endswith(s[:n])), default=0)
        assert shown == text[: i - held]


@pytest.mark.parametrize(("stops", "text", "shown"), [
    (("aab",), "aaab", "a"),  # one character more than the beginning
    (("abac",), "ababac", "ab"),
    (("abcd", "bce"), "abce", "a"),  # out of one stop string into another
    (("abcd", "bc"), "abc", "a"),  # one inside the other
    (("b", "ab"), "ab", ""),  # both end here: the longer one
])  # fmt: skip
def test_overlapping_beginnings(stops, text, shown):
    assert "".join(run(stops, list(text))[0]) == shown


def test_holds_back_a_beginning_and_releases_it():
    matcher = StopStringMatcher(("</answer>",))
    assert matcher.push("42 </ans") == "42 "
    assert matcher.push("wers>") == "</answers>"
    assert matcher.flush() == ""


def test_include_holds_nothing_back():
    matcher = StopStringMatcher(("END",), include_stop=True)
    assert [matcher.push(t) for t in ("x E", "ND and more")] == ["x E", "ND"]
    assert matcher.matched == "END"


def test_first_characters_that_mean_something_in_a_regular_expression():
    for stop in ("]", "^", "-", "\\", "a-", "\n\n"):
        assert run((stop, "]x"), ["q", stop, "q"])[0] == ["q", ""]


class CountingText(str):
    """Counts the characters that a matcher looks at one by one."""

    seen = 0

    def __getitem__(self, key):
        if isinstance(key, int):
            CountingText.seen += 1
        return super().__getitem__(key)


def test_work_is_linear_for_a_stop_string_that_almost_matches():
    """The worst text: every character continues a beginning. Each is looked at once."""
    length = 3000
    matcher = StopStringMatcher(("a" * 1000 + "b",))
    CountingText.seen = 0
    shown = "".join(matcher.push(CountingText("a")) for _ in range(length))
    assert CountingText.seen == length
    assert shown + matcher.flush() == "a" * length


def test_automata_are_shared():
    assert automaton(("x", "y")) is automaton(("x", "y"))
