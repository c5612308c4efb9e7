"""Small tokenizers of every kind, made on disk as a model directory has them."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from xllm_npu.text.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it? naïve café, 你好,世界! 🎉👩‍👩‍👧 done\n",
    "def main():\n    print('Grüße aus Köln')  # комментарий\n\treturn [x**2 for x in range(10)]\n",
    "日本語のテキスト、とても短い。 한국어도 있어요. नमस्ते दुनिया\r\n\r\n  two  spaces   three",
] * 3
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _specials(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])  # not special, and with a blank in it


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False))  # fmt: skip
    _specials(backend)
    return backend


def _sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Whole words of TEXT's Latin part by merges; other characters only as bytes."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [TEXT[0][:50], TEXT[1]],
        trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS[:3], show_progress=False))  # fmt: skip
    model = json.loads(trained.to_str())["model"]
    vocab = {**{t: i for i, t in enumerate(SPECIALS[:3])}, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    return vocab, [tuple(m) for m in model["merges"]]


def llama2(strip: bool = True) -> Backend:
    vocab, merges = _sentencepiece_vocabulary()
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    _specials(backend)
    return backend


def metaspace() -> Backend:
    vocab, merges = _sentencepiece_vocabulary()
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    _specials(backend)
    return backend


def wordpiece() -> Backend:
    words = ["<unk>", "the", "quick", "brown", "fox", "##es", "##ing", "jump", "over", "lazy", "dog"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    _specials(backend)
    return backend


def no_decoder() -> Backend:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "�": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    _specials(backend)
    return backend


KINDS = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": lambda: llama2(strip=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "no_decoder": no_decoder,
}


def write(directory: Path, backend: Backend, **config) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "clean_up_tokenization_spaces": False, **config}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(body))
    return directory


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write(root / name, make()) for name, make in KINDS.items()}


@pytest.fixture(scope="session")
def tokenizers(directories) -> dict[str, Tokenizer]:
    return {name: Tokenizer(path) for name, path in directories.items()}


@pytest.fixture(scope="session")
def backends(directories) -> dict[str, Backend]:
    """The reference: the library alone, without anything of ours."""
    return {name: Backend.from_file(str(path / "tokenizer.json")) for name, path in directories.items()}


@pytest.fixture(scope="session")
def write_tokenizer():
    return write
