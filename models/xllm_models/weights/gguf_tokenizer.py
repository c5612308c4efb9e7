"""The tokenizer that a .gguf file carries, as a `tokenizers.Tokenizer` and as Hugging Face files.

Two kinds: byte-level BPE ("gpt2" in llama.cpp's words) with the pre-tokenizers in PRE_TOKENIZERS, and
SentencePiece BPE ("llama"), whose merges follow from its pieces' scores. Others are refused by name. Chat
templates are copied, not understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from xllm_models.weights.gguf_file import GgufError, GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types; 1 is normal, 5 unused, 6 a byte
_SPACE = "▁"
_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORDS = (  # words with at most one leading mark, digits in groups of DIGITS, marks, line ends, spaces
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"


def gguf_tokenizer(path: str | Path) -> tuple[Tokenizer, dict[str, str], str | None]:
    """(tokenizer, {"bos_token": text, ...}, chat template). Raises GgufError."""
    return tokenizer_of(GgufFile(path))


def export_hf_tokenizer(path: str | Path, out_dir: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which is all that the text side reads."""
    write_tokenizer(GgufFile(path), Path(out_dir))


def tokenizer_of(file: GgufFile) -> tuple[Tokenizer, dict[str, str], str | None]:
    kind = file.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise GgufError(
            f'{file.path} has a tokenizer of type "{kind}"; supported: {", ".join(_BUILDERS)}. '
            "Use the model's Hugging Face directory."
        )
    tokens = file.get("tokenizer.ggml.tokens")
    special = {
        name: tokens[token_id]
        for key, name in _SPECIAL_TOKENS.items()
        if (token_id := file.token_id(key)) is not None and token_id < len(tokens)
    }
    tokenizer = _BUILDERS[kind](file, tokens, special)
    types = file.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([_added(t, True) for t, k in zip(tokens, types) if k == _CONTROL])
    tokenizer.add_tokens([_added(t, False) for t, k in zip(tokens, types) if k == _USER_DEFINED])
    _add_template(file, tokenizer, special, kind)
    return tokenizer, special, file.get("tokenizer.chat_template", None)


def write_tokenizer(file: GgufFile, out_dir: Path) -> None:
    tokenizer, special, chat_template = tokenizer_of(file)
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.count("context_length"),
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _byte_level_bpe(file: GgufFile, tokens: list[str], special: dict[str, str]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise GgufError(
            f'{file.path} has the pre-tokenizer "{pre}"; supported: {", ".join(PRE_TOKENIZERS)}. '
            "Use the model's Hugging Face directory."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _scored_bpe(file: GgufFile, tokens: list[str], special: dict[str, str]) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, scores),
        unk_token=special.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", _SPACE)
    if file.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others; pieces of higher score are merged first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, piece_id in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[piece_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_template(file: GgufFile, tokenizer: Tokenizer, special: dict[str, str], kind: str) -> None:
    """Begin and end tokens that encoding with special tokens adds."""
    bos_is_usual = kind == "llama" or file.get("tokenizer.ggml.pre", "default") in _WHOLE_WORDS_FIRST
    bos = special.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", bos_is_usual) else None
    eos = special.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part is not None],
        pair=[part for part in (bos, "$A", eos, bos, "$B", eos) if part is not None],
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in dict.fromkeys((bos, eos)) if t is not None],
    )


def _split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_only])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split_by(_WORDS.replace("DIGITS", "{1,3}"))


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split_by(_WORDS.replace("DIGITS", ""))


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _default() -> pre_tokenizers.PreTokenizer:
    return _split_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "default": _default,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word in the vocabulary is not taken apart
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought into Unicode's composed form first

_BUILDERS: dict[str, Callable[[GgufFile, list[str], dict[str, str]], Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _scored_bpe,
}
