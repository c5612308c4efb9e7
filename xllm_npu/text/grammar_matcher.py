"""From a grammar's text to a matcher, which says after each token what the next one may be.

A matcher is llguidance's `LLMatcher`: an Earley parser over lexemes that are derivatives of regular expressions. Here
is what it must know of the model: the bytes of each token, which of them are special, which end a sequence; and the
limits within which a grammar must stay. Compiling may take long for a grammar that nobody has checked.
Knows no request and no batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from tokenizers import Tokenizer as Backend

MAX_ERROR_CHARS = 500
MAX_LEXER_STATES = 1 << 16  # of a matcher, each one to two kB; text of up to that many characters needs as many at most


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why."""


_SENTINEL = "\x02"


class _TextTokenizer:
    """What llguidance asks of a tokenizer that it does not read itself.

    Text that a grammar forces is tokenized with the vocabulary of text alone. Left to itself llguidance would find
    special tokens in it ("<|im_end|>" as a constant of a schema), demand them, and then refuse them, as they are not
    text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, whole: llguidance.LLTokenizer, backend: Backend, eos_token_id: int) -> None:
        ids = range(whole.vocab_size)
        self.tokens = [whole.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if whole.is_special_token(i)]
        self.eos_token_id = eos_token_id
        self._backend = backend
        self._greedy = whole.greedy_tokenize
        self._sentinel = backend.token_to_id("<0x02>")  # where bytes are tokens of such names

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are those of the text; the model's usual ones where there are such.

        Many tokenizers put a blank before a text, which is not wanted in the middle of one.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._is(ids, text):
            return ids
        after = self._backend.encode(_SENTINEL + text, add_special_tokens=False).ids
        if self._sentinel in after:
            after = after[after.index(self._sentinel) + 1 :]
            if self._is(after, text):
                return after
        return self._greedy(text)

    def _is(self, ids: list[int], text: str) -> bool:
        return b"".join(self.tokens[i] for i in ids) == text.encode()


class MatcherFactory:
    """Makes matchers over the tokens of one model; its tables take about 20 us a token to build."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: of the `tokenizers` library. `vocab_size`: width of the model's logits.

        Raises GrammarError for a model that cannot have grammars.
        """
        if not eos_token_ids:
            raise GrammarError("The model has no end-of-sequence token, which the end of structured output needs.")
        described = json.loads(tokenizer_json)
        ids = [*described["model"]["vocab"].values()] if isinstance(described["model"]["vocab"], dict) else [
            len(described["model"]["vocab"]) - 1]
        ids += [token["id"] for token in described["added_tokens"]]
        self.vocab_size = max(vocab_size, max(ids) + 1)
        eos = [t for t in eos_token_ids if t < self.vocab_size]
        try:
            whole = llguidance.LLTokenizer(tokenizer_json, n_vocab=self.vocab_size, eos_token=eos)
        except ValueError as error:  # a kind of tokenizer that it does not know
            raise GrammarError(f"Structured output does not work with the model's tokenizer: {error}.") from error
        text_only = Backend.from_str(json.dumps({**described, "added_tokens": [], "post_processor": None}))
        wrapper: Any = _TextTokenizer(whole, text_only, eos[0])
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=eos)
        self._limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At the grammar's beginning. Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(error_text(matcher))
        return matcher

    def check(self, grammar: str) -> None:
        """Raise GrammarError for one that cannot be compiled, nor begun within the limits of a step."""
        matcher = self.matcher(grammar)
        bitmask = np.zeros((1, (self.vocab_size + 31) // 32), np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher, bitmask)
        if matcher.is_error():
            raise GrammarError(error_text(matcher))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError("Nothing matches it.")


def error_text(matcher: llguidance.LLMatcher) -> str:
    """llguidance's words on one line, cut."""
    text = " ".join(matcher.get_error().split()) or "It cannot be compiled."
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
