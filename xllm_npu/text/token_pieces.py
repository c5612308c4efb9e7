"""What one token adds to a text: a complete string, raw bytes, or nothing.

Almost every tokenizer of a generative model decodes token by token: the text of a sequence is the tokens'
pieces in a row. `TextForm` says which of the two known ways a tokenizer joins them, `PieceTable` holds the
pieces (made when first asked for, shared by all sequences). A tokenizer that decodes in some other way has no
pieces, `TextForm.kind` is OPAQUE, and `detokenizer` falls back to decoding windows of tokens. Knows nothing
of sequences and streams.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

BYTES, PIECES, OPAQUE = "bytes", "pieces", "opaque"

Piece = str | bytes | None  # None: the token is not part of the text at all

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a tokenizer's decoder turns tokens into text.

    BYTES: tokens are written in the printable alphabet of byte-level BPE; their bytes in a row are decoded as
    UTF-8. PIECES: tokens are text (SentencePiece); `<0xAB>` tokens are bytes when `byte_fallback` is set.
    """

    kind: str
    replacements: tuple[tuple[str, str], ...] = ()  # PIECES: done in each token, in order
    byte_fallback: bool = False
    strip: str = ""  # PIECES: this character is dropped, up to strip_count times, where the whole text begins
    strip_count: int = 0
    first_without: str = ""  # PIECES: this character is dropped from the first token

    @property
    def depends_on_start(self) -> bool:
        return bool(self.strip_count or self.first_without)


def text_form(backend: Backend) -> TextForm:
    """Recognise the decoder of a `tokenizers.Tokenizer`; OPAQUE if it is not one of the two known forms."""
    if backend.decoder is None:
        return TextForm(OPAQUE)
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    if [s["type"] for s in steps if s["type"] != "Fuse"] == ["ByteLevel"]:
        return TextForm(BYTES)
    if len(steps) == 1 and steps[0]["type"] == "Metaspace":
        mark = steps[0]["replacement"]
        keeps_first = steps[0].get("prepend_scheme", "always") == "never"
        return TextForm(PIECES, ((mark, " "),), first_without="" if keeps_first else mark)
    return _sentencepiece_form(steps)


def _sentencepiece_form(steps: list[dict[str, Any]]) -> TextForm:
    """Replace*, ByteFallback?, Fuse?, Strip?: in that order, with only leading strips, and those after
    Fuse.
    """
    todo = list(steps)
    replacements: list[tuple[str, str]] = []
    while todo and todo[0]["type"] == "Replace" and "String" in todo[0]["pattern"]:
        step = todo.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(todo) and todo[0]["type"] == "ByteFallback"
    if byte_fallback:
        todo.pop(0)
    fused = bool(todo) and todo[0]["type"] == "Fuse"
    if fused:
        todo.pop(0)
    strip, count = "", 0
    if fused and todo and todo[0]["type"] == "Strip" and todo[0]["stop"] == 0:
        step = todo.pop(0)
        strip, count = step["content"], step["start"]
    if todo or not steps:
        return TextForm(OPAQUE)
    return TextForm(PIECES, tuple(replacements), byte_fallback, strip, count)


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte: itself where printable, else 256
    upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if chr(b) not in alphabet]
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


def complete_text(data: bytes) -> str | None:
    """`data` as text if it is whole UTF-8 characters, else None."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


class PieceTable(dict[int, Piece]):
    """token id -> piece, filled on first use. Safe to share between threads: two makers make the same
    piece.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int], Piece]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Piece:
        piece = self._make(token_id)
        self[token_id] = piece
        return piece


def piece_maker(backend: Backend, form: TextForm, skipped: frozenset[int]) -> Callable[[int], Piece]:
    """The function that makes a token's piece; `skipped` ids and ids without a token have none."""

    def of_bytes(token: str) -> Piece:
        values = [_BYTE_OF.get(c, -1) for c in token]
        # A token with any other character (an added one, with a blank say) stands for its own text.
        data = token.encode("utf-8") if -1 in values else bytes(values)
        text = complete_text(data)
        return data if text is None else text

    def of_text(token: str) -> Piece:
        for old, new in form.replacements:
            token = token.replace(old, new)
        if form.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token

    convert = of_bytes if form.kind == BYTES else of_text

    def make(token_id: int) -> Piece:
        if token_id in skipped:
            return None
        token = backend.id_to_token(token_id)
        return None if token is None else convert(token)

    return make
