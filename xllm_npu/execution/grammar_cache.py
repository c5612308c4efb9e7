"""Compiled grammars of an engine: made on a thread, before the scheduler hears of the requests that need them.

A step never waits for a grammar: a request whose grammar is being compiled is not scheduled. The tables of the model's
tokens are built with the first grammar, on the same thread. Used by the engine's thread and the worker's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

MAX_GRAMMARS = 256  # compiled, and kept for the requests to come


class Compiler(Protocol):
    """`text.grammar_matcher.MatcherFactory`, which a module of this room may not name."""

    vocab_size: int  # of the masks; at least that of the model

    def matcher(self, grammar: str) -> Any:
        """An llguidance.LLMatcher. Raises ValueError for what is no grammar."""
        ...


class GrammarCache:
    def __init__(self, load: Callable[[], Compiler]) -> None:
        """`load` may take seconds."""
        self._load = load
        self._compiler: Compiler | None = None
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @property
    def vocab_size(self) -> int:
        """Of the masks; known once a grammar has been compiled."""
        assert self._compiler is not None
        return self._compiler.vocab_size

    def prepare(self, grammar: str) -> Future[Any]:
        """Done when `matcher` will not have to wait; its exception says why it will not come about."""
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None or (future.done() and future.exception() is not None):
                future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
            return future

    def matcher(self, grammar: str) -> Any:
        """A matcher of its own for one sequence, at the grammar's beginning."""
        return self.prepare(grammar).result().deep_copy()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> Any:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.matcher(grammar)


class PreparedRequests:
    """The requests of an engine whose grammars are being compiled, by id."""

    def __init__(self, grammars: GrammarCache) -> None:
        self._grammars = grammars
        self._waiting: dict[int, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: int, grammar: str) -> bool:
        """Whether the request may run at once."""
        future = self._grammars.prepare(grammar)
        if future.done() and future.exception() is None:
            return True
        self._waiting[request_id] = future
        return False

    def take_done(self, timeout: float = 0.0) -> list[tuple[int, str]]:
        """Requests that need not wait any more, and why they cannot run, or ""; waits for the first one."""
        if timeout:
            wait(self._waiting.values(), timeout, "FIRST_COMPLETED")
        done = [(i, f) for i, f in self._waiting.items() if f.done()]
        for request_id, _ in done:
            del self._waiting[request_id]
        return [(i, _reason(f)) for i, f in done]


def _reason(future: Future[Any]) -> str:
    error = future.exception()
    return "" if error is None else f"The grammar of this request cannot be used: {error}"
