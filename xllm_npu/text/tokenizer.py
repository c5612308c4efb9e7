"""Text to token ids and back, for one model directory.

Wraps the fast tokenizer that transformers finds in the directory. Code that comes with a model is never run.
All methods may be called from several threads: nothing here changes the backend after loading (truncation and
padding, which transformers switches on and off for each call, are off for good).

`decode` is the whole-text twin of the detokenizers this hands out: same pieces, same text. It does not do
transformers' `clean_up_tokenization_spaces`, which cannot be done on a stream.
Knows nothing of requests, stop strings and chat messages.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.detokenizer import ByteDetokenizer, Detokenizer, PieceDetokenizer, WindowDetokenizer
from xllm_npu.text.token_pieces import BYTES, OPAQUE, PIECES, PieceTable, TextForm, piece_maker, text_form

log = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_CHECKED_TOKENS = 64
_PLACES = ("name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file")


class TokenizerError(RuntimeError):
    """The directory has no tokenizer that can be used; the message says what is missing."""


class Tokenizer:
    """The tokenizer of one model.

    Attributes: `vocab_size` (largest id + 1, added tokens included), `eos_token_id`, `bos_token_id` (None if
    the model has none), `special_ids`, `special_tokens` (name to text, for chat templates), `added_tokens` (text
    to id, special or not), `marker_ids` (those of them that are no text to a grammar), `chat_template` (the
    model's own: source, or sources by name; None if it has none).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        hf = _load(directory)
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_id: int | None = hf.eos_token_id
        self.bos_token_id: int | None = hf.bos_token_id
        self.special_tokens: dict[str, str] = {k: str(v) for k, v in hf.special_tokens_map.items()}
        self.chat_template: str | dict[str, str] | None = hf.chat_template
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_tokens: dict[str, int] = {token.content: i for i, token in added.items()}
        # Tokens that a grammar has to name by id, as llguidance takes them for no text.
        self.marker_ids: dict[str, int] = {
            text: i for text, i in self.added_tokens.items()
            if i in self.special_ids or (text.startswith("<") and text.endswith(">"))
        }
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._use_form(text_form(self._backend))
        if self._form.kind != OPAQUE and not self._pieces_are_right():
            log.warning("%s: an unusual tokenizer; streaming takes the slower path.", directory)
            self._use_form(TextForm(OPAQUE))

    def _use_form(self, form: TextForm) -> None:
        self._form = form
        self._all = PieceTable(piece_maker(self._backend, form, frozenset()))
        self._without: dict[frozenset[int], PieceTable] = {}
        self._alone: dict[int, tuple[str, list[int]]] = {}

    def _pieces_are_right(self) -> bool:
        """Compare a decode by pieces with the backend's own on tokens from the whole vocabulary."""
        ids = list(range(0, self.vocab_size, max(1, self.vocab_size // _CHECKED_TOKENS)))
        return self.decode(ids, False) == self._backend.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        """The whole tokenizer as the `tokenizers` library writes it."""
        return self._backend.to_str()

    def settings(self) -> dict[str, Any]:
        """What tokenizer_config.json says, but for where its author had the files."""
        path = self.directory / "tokenizer_config.json"
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return {name: value for name, value in found.items() if name not in _PLACES}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidParameter('prompt', ...) for text that is not valid Unicode."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # the backend's word for a str that is no Unicode text
            lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise
            message = f"The text has a lone surrogate ({lone!a}), which is not valid Unicode."
            raise InvalidParameter("prompt", message) from None

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = True, side: str = "right") -> list[int]:
        """As `encode`, the text cut at this side so that `limit` tokens remain, special ones included."""
        encoding = self._plain(text)
        room = limit - (self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0)
        if len(encoding) > room:
            encoding.truncate(_room(room), direction=side)
        return list(self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids)

    def encode_pair(self, first: str, second: str, limit: int) -> tuple[list[int], list[int]]:
        """(ids, type of each) of two texts in one prompt; where `limit` is not 0, the longer is cut until they fit."""
        one, two = self._plain(first), self._plain(second)
        if limit:
            room = _room(limit - self._backend.num_special_tokens_to_add(True))
            keep_one, keep_two = shared_room(len(one), len(two), room)
            one.truncate(keep_one)
            two.truncate(keep_two)
        both = self._backend.post_process(one, two)
        return list(both.ids), list(both.type_ids)

    def _plain(self, text: str) -> Encoding:
        """Without special tokens. Raises InvalidParameter."""
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except TypeError:  # the backend's word for a str that is no Unicode text
            self.encode(text)  # says what is wrong
            raise

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the whole sequence; ids that no token has add nothing."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push_all(ids) + detokenizer.flush()

    @property
    def prompt_matters(self) -> bool:
        """Whether `detokenizer` needs to know the prompt."""
        return self._form.kind == OPAQUE or self._form.depends_on_start

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_special_tokens: Collection[str] = (),
    ) -> Detokenizer:
        """A detokenizer for the tokens that follow `prompt`; `shown_special_tokens` are not skipped in any case."""
        skipped = self._skipped(shown_special_tokens) if skip_special_tokens else frozenset()
        pieces = self._pieces(skipped)
        if self._form.kind == BYTES:
            return ByteDetokenizer(pieces)
        if self._form.kind == PIECES:
            return PieceDetokenizer(self._backend, pieces, self._form, prompt)
        raw = frozenset() if spaces_between_special_tokens else self.special_ids - skipped
        # The backend skips all special tokens or none; those to be skipped never reach it.
        return WindowDetokenizer(self._backend, skipped == self.special_ids, skipped, raw, prompt)

    def _skipped(self, shown: Collection[str]) -> frozenset[int]:
        if not shown:
            return self.special_ids
        ids = {self._backend.token_to_id(text) for text in shown}
        return self.special_ids if ids.isdisjoint(self.special_ids) else self.special_ids - ids

    def _pieces(self, skipped: frozenset[int]) -> PieceTable:
        """A model has few sets of tokens that are shown: all of them, none, and the markers that it writes."""
        if not skipped:
            return self._all
        table = self._without.get(skipped)
        if table is None:
            table = self._without[skipped] = PieceTable(piece_maker(self._backend, self._form, skipped))
        return table

    def token_text(self, token_id: int) -> str:
        """The token alone, as text: half a character shows as U+FFFD; "" for an id without a token."""
        return self._alone_of(token_id)[0]

    def token_bytes(self, token_id: int) -> list[int]:
        """The token alone, as UTF-8 bytes. Shared: do not change the list."""
        return self._alone_of(token_id)[1]

    def _alone_of(self, token_id: int) -> tuple[str, list[int]]:
        known = self._alone.get(token_id)
        if known is None:
            piece: str | bytes | None
            if self._form.kind == OPAQUE:
                piece = self._backend.decode([token_id], skip_special_tokens=False)
            else:
                piece = self._all[token_id] or ""
            data = piece if isinstance(piece, bytes) else piece.encode("utf-8")
            known = self._alone[token_id] = (data.decode("utf-8", "replace"), list(data))
        return known


def shared_room(first: int, second: int, room: int) -> tuple[int, int]:
    """How many of two texts' tokens stay: the longer one gives way until both fit into `room`."""
    if first + second <= room:
        return first, second
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= room - half:
        return room - second, second
    return half, room - half


def _room(room: int) -> int:
    if room < 1:
        raise InvalidParameter("truncate_prompt_tokens", "truncate_prompt_tokens leaves no room for a token of the "
                                                         "text beside the special ones.")
    return room


def spare_torch() -> None:
    """Keep transformers from importing torch in this process, which half of its tokenizer's loading time and 200 MB
    go to. For a process that only tokenizes; call it before the first Tokenizer is made.
    """
    if "torch" in sys.modules:
        return
    from transformers import utils
    from transformers.utils import import_utils

    for module in (import_utils, utils):  # modules that are imported from now on take the name from one of them
        module.is_torch_available = lambda: False


def _load(directory: Path) -> Any:
    """transformers' tokenizer for the directory; TokenizerError with what is wrong."""
    if not directory.is_dir():
        raise TokenizerError(f"{directory} is not a directory.")
    if not any((directory / name).is_file() for name in _FILES):
        raise TokenizerError(
            f"{directory} has no tokenizer: none of {', '.join(_FILES)} is there. "
            "Copy the tokenizer files of the model into it."
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    try:
        hf = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as e:  # any parser's error: what matters to the user is which file, and the cause
        if not (directory / "tokenizer.json").is_file():
            raise TokenizerError(f"The tokenizer in {directory} cannot be loaded: {e}") from e
        # A directory whose configuration names a class that does not exist here still has the whole tokenizer
        # in tokenizer.json.
        log.info("Loading %s/tokenizer.json directly: %s", directory, e)
        try:
            hf = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        except Exception as second:
            raise TokenizerError(f"{directory}/tokenizer.json cannot be loaded: {second}") from second
    if getattr(hf, "backend_tokenizer", None) is None:
        raise TokenizerError(
            f"The tokenizer in {directory} ({type(hf).__name__}) has no fast form. "
            "Convert it to a tokenizer.json with transformers."
        )
    return hf
