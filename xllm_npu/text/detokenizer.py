"""Tokens of one sequence to text, one token at a time, never half a character.

Contract: the strings returned by `push`/`push_all`, and at the end by `flush`, joined, are exactly what
decoding all tokens at once gives (after the prompt's text where the decoder treats the beginning of a text
differently: the leading blank that SentencePiece decoders drop belongs to the prompt, not to the answer).
Bytes that are no UTF-8 come out as U+FFFD, in the same number as in a whole decode.

Cost on one core of a small server: 0.2 to 0.3 us a token for the two known forms (a dictionary look-up and a type
check while characters are whole), about 1 us for the window fallback.

Knows nothing of stop strings, stop tokens and requests. Not thread-safe: one object, one sequence, one
thread.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend

from xllm_npu.text.token_pieces import PieceTable, TextForm

REPLACEMENT = "\ufffd"
_WINDOW = 6  # prompt tokens a window decoder starts from
_MAX_HELD = 16  # tokens a window decoder holds back for a text that keeps ending in U+FFFD


class Detokenizer(Protocol):
    """One sequence's decoder."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same for many tokens, faster."""

    def flush(self) -> str:
        """What is still held back, at the end of the sequence."""


class ByteDetokenizer:
    """TextForm BYTES. Pending are at most three bytes: the beginning of a UTF-8 character."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._pending = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece.__class__ is str and not self._pending:
            return piece
        return self._decode(_as_bytes(piece))

    def push_all(self, token_ids: Iterable[int]) -> str:
        pieces = [self._pieces[t] for t in token_ids]
        return self._decode(b"".join(map(_as_bytes, pieces)))

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def _decode(self, data: bytes) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class PieceDetokenizer:
    """TextForm PIECES. Pending is a run of byte tokens.

    A run is decoded when it ends, not before: as a whole it is either valid UTF-8 or one U+FFFD for each
    byte.
    """

    __slots__ = ("_backend", "_first", "_form", "_pieces", "_run", "_strip_left")

    def __init__(
        self, backend: Backend, pieces: PieceTable, form: TextForm, prompt: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._form = form
        self._run = bytearray()
        self._first = bool(form.first_without)
        self._strip_left = form.strip_count
        for token_id in prompt:
            if not (self._first or self._strip_left):
                break
            self.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if piece.__class__ is bytes:
            self._run += piece
            return ""
        text: str = piece  # type: ignore[assignment]
        if self._first:
            self._first = False
            text = (self._backend.id_to_token(token_id) or "").replace(self._form.first_without, "")
        if self._run:
            text = self._end_run() + text
        return self._stripped(text) if self._strip_left else text

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Drop leading blanks while the whole text is still at its beginning."""
        dropped = 0
        while dropped < min(self._strip_left, len(text)) and text[dropped] == self._form.strip:
            dropped += 1
        self._strip_left = 0 if dropped < len(text) else self._strip_left - dropped
        return text[dropped:]


class WindowDetokenizer:
    """TextForm OPAQUE: decodes the last few tokens again and returns what was not there before."""

    __slots__ = ("_backend", "_ids", "_known", "_last_special", "_raw_specials", "_skip", "_skipped")

    def __init__(
        self,
        backend: Backend,
        skip_special_tokens: bool,
        skipped: frozenset[int],
        raw_specials: frozenset[int],
        prompt: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._skipped = skipped
        self._raw_specials = raw_specials  # written without a blank between two of them; usually none
        self._last_special = False
        self._ids = [t for t in prompt[-_WINDOW:] if t not in skipped]
        self._known = self._decode()  # text of the window that has been returned, or belongs to the prompt

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._backend.id_to_token(token_id) is None:
            return ""
        special, was_special = token_id in self._raw_specials, self._last_special
        self._last_special = special
        if special and was_special:
            held = self.flush()
            self._ids = [token_id]
            self._known = self._decode()
            return held + self._known
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._ids) < _MAX_HELD:
            return ""
        return self._advance(text)

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        """Return the new part of the window's text, and begin a new window at its last token."""
        new = text[len(self._known) :]
        self._ids = self._ids[-1:]
        self._known = self._decode()
        return new

    def _decode(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip) if self._ids else ""


def _as_bytes(piece: str | bytes | None) -> bytes:
    if piece is None:
        return b""
    return piece if isinstance(piece, bytes) else piece.encode("utf-8")
