"""Deltas, joined, are what a whole decode gives, for every kind of tokenizer and any tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

KINDS = ["byte_level", "llama2", "gemma", "metaspace", "wordpiece", "no_decoder"]
IDS = st.lists(st.integers(0, 700), max_size=40)  # some of them without a token


def stream(detokenizer, ids) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(ids=IDS, skip=st.booleans())
def test_deltas_join_to_the_whole_decode(tokenizers, backends, kind, ids, skip):
    ours = tokenizers[kind]
    whole = backends[kind].decode(ids, skip_special_tokens=skip)
    assert "".join(stream(ours.detokenizer(skip_special_tokens=skip), ids)) == whole
    assert ours.decode(ids, skip) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=st.lists(st.integers(260, 560), min_size=1, max_size=8), ids=IDS, skip=st.booleans())
def test_after_a_prompt_the_deltas_continue_its_text(tokenizers, backends, kind, prompt, ids, skip):
    """Also when the prompt is nothing but special tokens. (Prompts here end with whole characters.)"""
    backend = backends[kind]
    prompt = [i for i in prompt if backend.id_to_token(i) and "�" not in backend.decode([i])]
    if kind in ("wordpiece", "no_decoder"):
        prompt = [i % 5 for i in prompt]
    whole = backend.decode(prompt + ids, skip_special_tokens=skip)
    before = backend.decode(prompt, skip_special_tokens=skip)
    detokenizer = tokenizers[kind].detokenizer(prompt, skip_special_tokens=skip)
    assert before + "".join(stream(detokenizer, ids)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
@given(data=st.binary(max_size=24))
def test_any_bytes_valid_or_not(tokenizers, backends, kind, data):
    backend = backends[kind]
    if kind == "llama2":
        ids = [backend.token_to_id(f"<0x{b:02X}>") for b in data]
    else:
        ids = [i for b in data for i in range(256) if tokenizers[kind].token_bytes(i) == [b]]
    assert len(ids) == len(data)
    assert "".join(stream(tokenizers[kind].detokenizer(), ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_real_text_comes_back_and_no_character_is_halved(tokenizers, kind):
    text = "Grüße 👩‍👩‍👧 你好 done"
    ids = tokenizers[kind].encode(text, add_special_tokens=False)
    deltas = stream(tokenizers[kind].detokenizer(), ids)
    assert "".join(deltas).lstrip() == text
    assert not any("�" in d for d in deltas)
    assert sum(map(bool, deltas)) > 3  # it does stream


def test_an_incomplete_character_at_the_end_is_flushed(tokenizers):
    tokenizer = tokenizers["byte_level"]
    first = tokenizer.encode("अ")[0]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_leading_blank_belongs_to_the_prompt(tokenizers):
    """After a prompt a word begins with its blank; at the beginning of a text it does not."""
    tokenizer = tokenizers["llama2"]
    bos = tokenizer.bos_token_id
    word = tokenizer.encode("print", add_special_tokens=False)
    assert "".join(stream(tokenizer.detokenizer([bos]), word)) == "print"
    assert "".join(stream(tokenizer.detokenizer([bos, *word]), word)) == " print"
    assert "".join(stream(tokenizer.detokenizer([bos], skip_special_tokens=False), word)) == " print"


def test_no_blank_between_special_tokens_on_request(tokenizers):
    tokenizer = tokenizers["wordpiece"]
    start, end = (tokenizer.encode(t)[0] for t in ("<|im_start|>", "<|im_end|>"))
    fox = tokenizer.encode("fox")[0]

    def text(spaces: bool) -> str:
        return "".join(stream(tokenizer.detokenizer((), False, spaces), [start, end, fox]))

    assert text(True) == "<|im_start|> <|im_end|> fox"
    assert text(False) == "<|im_start|><|im_end|> fox"


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "wordpiece"])
def test_special_tokens_that_are_shown_all_the_same(tokenizers, kind):
    tokenizer = tokenizers[kind]
    start, end = (tokenizer.encode(t, add_special_tokens=False)[0] for t in ("<|im_start|>", "<|im_end|>"))

    def text(*shown: str, skip: bool = True) -> str:
        detokenizer = tokenizer.detokenizer((), skip, shown_special_tokens=shown)
        return "".join([*stream(detokenizer, [start, end]), detokenizer.flush()]).replace(" ", "")

    assert text() == ""
    assert text("<|im_end|>") == "<|im_end|>"
    assert text("<|im_end|>", "<tool call>", "no token") == "<|im_end|>"
    assert text("<|im_start|>", "<|im_end|>") == text("<|im_end|>", skip=False) == "<|im_start|><|im_end|>"


def test_windows_stay_short_when_the_text_keeps_ending_in_a_replacement_character(tokenizers):
    detokenizer = tokenizers["no_decoder"].detokenizer()
    deltas = [detokenizer.push(3) for _ in range(100)]
    assert any(deltas)
    assert "".join([*deltas, detokenizer.flush()]) == " ".join("�" * 100)
