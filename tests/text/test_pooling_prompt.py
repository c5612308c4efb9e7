"""Prompts of embeddings and pairs against what transformers' tokenizers make of the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import byte_tokenizer, write_tokenizer
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.pooling_prompt import encode_inputs, encode_pairs
from xllm_npu.text.tokenizer import Tokenizer, shared_room

TEXTS = ("", "a", "some words", "many more words than the others have, and then some")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)])
    backend.enable_truncation(5)  # as published tokenizers have it, which must not show
    backend.enable_padding(length=9)
    write_tokenizer(directory, backend)
    return Tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(str(directory))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_texts_within_a_limit(tokenizers, side: str, special: bool) -> None:
    ours, theirs = tokenizers
    theirs.truncation_side = side
    for limit in (3, 7, 100):
        expected = [theirs(text, truncation=True, max_length=limit, add_special_tokens=special)["input_ids"]
                    for text in TEXTS]
        assert encode_inputs(ours, TEXTS, limit, special, side) == expected
    assert encode_inputs(ours, TEXTS, 0, special) == [ours.encode(text, special) for text in TEXTS]


def test_pairs_within_a_limit(tokenizers) -> None:
    ours, theirs = tokenizers
    theirs.truncation_side = "right"
    for first in TEXTS:
        for second in TEXTS[1:]:  # transformers takes an empty one for none
            for limit in (0, 20, 200):
                found = theirs(first, second, truncation=bool(limit), max_length=limit or None)
                (prompt,) = encode_pairs(ours, [(first, second)], limit, "tokens", 1000, 2)
                if limit and len(first) + len(second) + 3 > limit:
                    assert len(prompt) == len(found["input_ids"]) == limit
                else:
                    assert [i % 1000 for i in prompt] == found["input_ids"]
                if "token_type_ids" in found and len(prompt) < (limit or 10**6):
                    assert [i // 1000 for i in prompt] == found["token_type_ids"]
    (alone,) = encode_pairs(ours, [("a", "b")], 0, "tokens", 1000, 1)
    assert max(alone) < 1000, "a network with one type of tokens has no other ids"


@pytest.mark.parametrize(("first", "second", "room", "kept"), [
    (3, 4, 7, (3, 4)), (3, 10, 8, (3, 5)), (10, 3, 8, (5, 3)), (10, 10, 8, (4, 4)), (10, 10, 9, (4, 5)),
    (0, 10, 4, (0, 4)), (9, 1, 2, (1, 1)),
])
def test_the_longer_gives_way(first: int, second: int, room: int, kept: tuple[int, int]) -> None:
    assert shared_room(first, second, room) == kept


def test_a_limit_below_the_special_tokens_is_refused(tokenizers) -> None:
    ours, _ = tokenizers
    with pytest.raises(InvalidParameter, match="no room"):
        encode_inputs(ours, ["abc"], 2)
    with pytest.raises(InvalidParameter, match="no room"):
        encode_pairs(ours, [("abc", "d")], 3, "tokens", 1000, 2)
