"""Watches emitted text for stop strings and holds back what may be the beginning of one.

Contract: the text is read as one stream of characters, however it is cut into pushes. The stream ends at the
first character that completes a stop string (if it completes several, the longest counts); what was returned
before that, joined, is the text up to the stop string's beginning, or to its end with `include_stop`. An
Aho-Corasick automaton makes this linear in the text, whatever the stop strings are; text that has no first
character of a stop string in it costs one regular expression search. Knows nothing of tokens.
"""

import re
from collections import deque
from functools import lru_cache


class StopAutomaton:
    """The automaton of a set of stop strings; immutable, shared by the matchers of all sequences."""

    __slots__ = ("begins", "depth", "ends", "fail", "next", "path", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.next: list[dict[str, int]] = [{}]  # state -> character -> state, tree edges only
        self.fail = [0]  # state of the longest proper suffix that is also a beginning
        self.depth = [0]  # characters of the beginning that the state stands for
        self.path = [0]  # a stop string that begins with them
        self.ends = [-1]  # the longest stop string that ends here, or -1
        for index, stop in enumerate(stops):
            self._add(index, stop)
        self._link()
        self.begins = re.compile("[" + "".join(re.escape(c) for c in sorted({s[0] for s in stops})) + "]")

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for c in stop:
            following = self.next[state].get(c)
            if following is None:
                following = self.next[state][c] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.path.append(index)
                self.ends.append(-1)
            state = following
        if self.ends[state] < 0:
            self.ends[state] = index

    def _link(self) -> None:
        todo = deque(self.next[0].values())
        while todo:
            state = todo.popleft()
            for c, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], c)
                todo.append(child)
            if self.ends[state] < 0:
                self.ends[state] = self.ends[self.fail[state]]

    def step(self, state: int, c: str) -> int:
        while True:
            following = self.next[state].get(c)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


@lru_cache(maxsize=256)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The same stop strings come with every request of a client."""
    return StopAutomaton(stops)


class StopStringMatcher:
    """One sequence's text. After a match nothing more may be pushed."""

    __slots__ = ("_automaton", "_include", "_state", "matched")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._automaton = automaton(stops)
        self._include = include_stop
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `matched` when a stop string is complete."""
        a = self._automaton
        state, pos = self._state, 0
        while pos < len(text):
            if state == 0:
                found = a.begins.search(text, pos)
                if found is None:
                    break
                pos = found.start()
            state = a.step(state, text[pos])
            pos += 1
            if a.ends[state] >= 0:
                return self._finish(text, pos, a.stops[a.ends[state]])
        shown = self._cut(text, len(text) if self._include else len(text) - a.depth[state])
        self._state = state
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown = "" if self._include else self._cut("", 0)
        self._state = 0
        return shown

    def _finish(self, text: str, end: int, stop: str) -> str:
        self.matched = stop
        shown = self._cut(text, end if self._include else end - len(stop))
        self._state = 0
        return shown

    def _cut(self, text: str, end: int) -> str:
        """What is held back and then `text`, up to `end`, which counts from the beginning of `text`."""
        if self._include or self._state == 0:
            return text[:end]
        held = self._automaton.depth[self._state]
        stop = self._automaton.stops[self._automaton.path[self._state]]
        # Held-back text is the beginning of a stop string, so it needs no storing and no copying.
        return stop[: held + end] if end < 0 else stop[:held] + text[:end]
