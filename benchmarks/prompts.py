"""Prompts of an exact token count, as text, for any byte-level BPE tokenizer; and the standard workloads.

A prompt is a row of vocabulary words (" abc") that the pre-tokenizer splits off and that are one token each, so n
words are n tokens; every prompt is checked by encoding it. Knows no server.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

SPACE = "\u0120"  # how byte-level BPE vocabularies write a leading space


@dataclass(slots=True, frozen=True)
class Workload:
    """Lengths in tokens."""

    shared: int  # prefix that all prompts have in common
    unique: int
    output: int
    concurrency: int
    requests: int


WORKLOADS = {
    "a": Workload(shared=0, unique=128, output=128, concurrency=1, requests=3),
    "b": Workload(shared=0, unique=128, output=128, concurrency=16, requests=64),
    "c": Workload(shared=0, unique=1024, output=16, concurrency=4, requests=8),
    "d": Workload(shared=1024, unique=32, output=32, concurrency=8, requests=16),
    "d0": Workload(shared=0, unique=1056, output=32, concurrency=8, requests=16),  # d with nothing shared
}


class PromptMaker:
    """The same seed gives the same prompts."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise SystemExit(
                f"{path} is missing; --model-dir must be a Hugging Face directory with a fast tokenizer"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        words = [w for w in self._tokenizer.get_vocab() if self._is_word(w)]
        self._words = sorted(" " + w[1:] for w in words if self._tokens(" " + w[1:]) == 1)
        if len(self._words) < 100:
            raise SystemExit(f"{path} has only {len(self._words)} words of one token; prompts need 100")

    def make(self, rng: random.Random, count: int) -> str:
        text = "".join(rng.choices(self._words, k=count))
        assert self._tokens(text) == count, "words must not merge with their neighbours"
        return text

    def prompts(self, workload: Workload, seed: int) -> list[str]:
        rng = random.Random(seed)
        prefix = self.make(rng, workload.shared)
        return [prefix + self.make(rng, workload.unique) for _ in range(workload.requests)]

    def _tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @staticmethod
    def _is_word(word: str) -> bool:
        rest = word[1:]
        return (
            word[:1] == SPACE and 3 <= len(rest) <= 8 and rest.isascii() and rest.isalpha() and rest.islower()
        )
