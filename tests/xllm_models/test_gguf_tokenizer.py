"""Tokenizers out of GGUF metadata, against the ones transformers builds for the same vocabulary."""

import json

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from xllm_models.config import ModelConfigError
from xllm_models.weights.gguf_tokenizer import PRE_TOKENIZERS, export_hf_tokenizer, gguf_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("Ġw", "o"),
    ("1", "2"),
    ("12", "3"),
]
BPE_TOKENS = [*BYTES, *(a + b for a, b in MERGES), "<|im_start|>", "<|im_end|>", "<tool_call>"]
BPE_TYPES = [1] * (len(BPE_TOKENS) - 3) + [3, 3, 4]
TEXTS = [
    "hello world 12345",
    "  Hello\n\n  wörld, don't  stop!!\r\n\tx",
    "数字123和文字。e\u0301",
    "<|im_start|>user\nhello<|im_end|><tool_call> hello",
    "🙂 1234567 a1b2",
    "",
]


def write(path, kind, tokens, types, **meta):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in meta.items():
        if key in ("bos", "eos", "unk", "pad"):
            getattr(writer, f"add_{key}_token_id")(value)
        else:
            getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_bpe(path, **meta):
    merges = [f"{a} {b}" for a, b in MERGES]
    end = len(BPE_TOKENS) - 2
    return write(path, "gpt2", BPE_TOKENS, BPE_TYPES, token_merges=merges, eos=end, pad=end, **meta)


# Letters, the pieces of "hello" and " world", and every byte, as SentencePiece numbers them.
SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
SPM_WORDS = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "▁world", "ld", "▁▁"]
SPM_LETTERS = list("▁helowrd") + ["ö"]


def write_spm(path, **meta):
    tokens = SPM_PIECES + SPM_WORDS + SPM_LETTERS
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_WORDS) + len(SPM_LETTERS))
    scores = [0.0] * len(SPM_PIECES) + [-float(i) for i in range(len(SPM_WORDS) + len(SPM_LETTERS))]
    return write(path, "llama", tokens, types, token_scores=scores, bos=1, eos=2, unk=0, **meta)


def test_qwen2_is_transformers_qwen2(tmp_path):
    ours, special, template = gguf_tokenizer(write_bpe(tmp_path / "m.gguf", tokenizer_pre="qwen2"))
    vocab = {t: i for i, t in enumerate(BPE_TOKENS)}
    theirs = Qwen2Tokenizer(
        vocab=vocab, merges=MERGES, eos_token="<|im_end|>", unk_token=None, pad_token="<|im_end|>"
    )
    theirs.add_tokens(["<|im_start|>"], special_tokens=True)
    theirs.add_tokens(["<tool_call>"])
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    assert special == {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert template is None


def test_qwen2_and_llama3_split_as_transformers_does():
    for pre, expected in (("qwen2", PRETOKENIZE_REGEX), ("llama-bpe", TikTokenConverter().pattern)):
        state = json.loads(PRE_TOKENIZERS[pre]().__getstate__())
        assert state["pretokenizers"][0]["pattern"]["Regex"] == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["Ċ", "123", "45", "Ġa", "'s", "Ġ", "Ġb", "!!"]),
        ("qwen2", ["Ċ", "1", "2", "3", "4", "5", "Ġa", "'s", "Ġ", "Ġb", "!!"]),
        ("smollm", ["Ċ", "1", "2", "3", "4", "5", "Ġa", "'s", "Ġ", "Ġb", "!!"]),
        ("gpt-2", ["Ċ", "12345", "Ġa", "'s", "Ġ", "Ġb", "!!"]),
        ("default", ["Ċ", "123", "45", "Ġa", "'", "s", "Ġ", "Ġb", "!!"]),
    ],
)
def test_pre_tokenizers(pre, pieces):
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("\n12345 a's  b!!")] == pieces


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    tokenizer, _, _ = gguf_tokenizer(write_bpe(tmp_path / "m.gguf", tokenizer_pre="smollm"))
    ids = tokenizer.encode("<|im_start|>hello<tool_call>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|im_start|>", "hello", "<tool_call>"]
    assert tokenizer.decode(ids) == "hello<tool_call>"


@pytest.mark.parametrize(
    ("pre", "meta", "added"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_begin_token_is_added_where_the_file_or_the_kind_says_so(tmp_path, pre, meta, added):
    bos = len(BPE_TOKENS) - 3
    tokenizer, _, _ = gguf_tokenizer(write_bpe(tmp_path / "m.gguf", tokenizer_pre=pre, bos=bos, **meta))
    assert (tokenizer.encode("hello").ids[0] == bos) is added
    assert bos not in tokenizer.encode("hello", add_special_tokens=False).ids


def test_whole_words_come_before_merges_for_llama3_only(tmp_path):
    tokens = [*BPE_TOKENS, "world"]  # no merges lead to it
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        path = write(
            tmp_path / f"{pre}.gguf", "gpt2", tokens, [*BPE_TYPES, 1], token_merges=["h e"], tokenizer_pre=pre
        )
        ids = gguf_tokenizer(path)[0].encode("world").ids
        assert (ids == [len(tokens) - 1]) is whole


def test_scored_pieces_make_the_tokens_that_merging_by_score_makes(tmp_path):
    tokenizer, special, _ = gguf_tokenizer(write_spm(tmp_path / "m.gguf"))
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert tokenizer.encode("wörld").tokens == ["<s>", "▁w", "ö", "r", "ld"]
    assert tokenizer.encode("数").tokens == ["<s>", "▁", "<0xE6>", "<0x95>", "<0xB0>"]
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in ("hello world", "数 wörld 🙂", "  two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_piece_of_higher_score_is_merged_first_whatever_its_number(tmp_path):
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    for best, expected in (("ab", ["ab", "c"]), ("bc", ["a", "bc"])):
        scores = [float(token == best) for token in tokens]
        path = write(
            tmp_path / "m.gguf", "llama", tokens, [2, 1, 1, 1, 1, 1], token_scores=scores, unk=0,
            add_space_prefix=False,
        )  # fmt: skip
        assert gguf_tokenizer(path)[0].encode("abc").tokens == expected


def test_space_prefix_and_end_token_follow_the_metadata(tmp_path):
    path = write_spm(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    tokenizer, _, _ = gguf_tokenizer(path)
    assert tokenizer.encode("hello world").tokens == ["hello", "▁world", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_exported_files_are_the_same_tokenizer_for_transformers(tmp_path, kind):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    meta = {"chat_template": template} | ({"tokenizer_pre": "qwen2"} if kind == "bpe" else {})
    path = (write_bpe if kind == "bpe" else write_spm)(tmp_path / "m.gguf", **meta)
    tokenizer, special, chat_template = gguf_tokenizer(path)
    export_hf_tokenizer(path, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids, text
    assert loaded.chat_template == chat_template == template
    assert loaded.eos_token == special["eos_token"]
    assert loaded.model_max_length == 512


def test_unknown_kinds_are_refused_by_name(tmp_path):
    path = write(tmp_path / "m.gguf", "t5", ["a"], [1])
    with pytest.raises(ModelConfigError, match='tokenizer of type "t5"; supported: gpt2, llama'):
        gguf_tokenizer(path)
    with pytest.raises(ModelConfigError, match='pre-tokenizer "tekken"; supported: llama-bpe'):
        gguf_tokenizer(write_bpe(tmp_path / "b.gguf", tokenizer_pre="tekken"))
