"""Prompts of models that give embeddings and scores: texts within a limit, and pairs of a query and a document.

Pairs go into a cross-encoder as its tokenizer joins them, or into Qwen3-Reranker by the prompt of its model card.
A token of the second text's type is another token for the network: its id is raised by the vocabulary's size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.tokenizer import Tokenizer

# https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
QWEN3_BEGIN = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the '
               'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROMPTS_FILE = "config_sentence_transformers.json"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def encode_inputs(
    tokenizer: Tokenizer, texts: Sequence[str | list[int]], limit: int, add_special_tokens: bool = True,
    side: str = "right",
) -> list[list[int]]:
    """Token ids of each, those that are ids already too; `limit`: tokens to keep of each (0: all), cut at `side`."""
    found = []
    for text in texts:
        if not isinstance(text, str):
            found.append(text if not limit else text[:limit] if side == "right" else text[-limit:])
        elif limit:
            found.append(tokenizer.encode_within(text, limit, add_special_tokens, side))
        else:
            found.append(tokenizer.encode(text, add_special_tokens))
    return found


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: int, form: str, vocab_size: int, num_types: int,
    instruction: str = "",
) -> list[list[int]]:
    """`form` is PoolingInfo.pairs; `limit` as above."""
    if form == "qwen3_reranker":
        return _qwen3(tokenizer, pairs, limit, instruction or QWEN3_INSTRUCTION)
    assert form == "tokens"
    prompts = []
    for first, second in pairs:
        ids, types = tokenizer.encode_pair(first, second, limit)
        prompts.append([i + vocab_size * min(t, num_types - 1) for i, t in zip(ids, types)])
    return prompts


@lru_cache(maxsize=64)
def prompt_prefixes(directory: Path) -> dict[str, str]:
    """What a model of sentence-transformers wants before a text, by kind of text (`prompts` of its settings)."""
    try:
        prompts = json.loads((directory / PROMPTS_FILE).read_text("utf-8"))["prompts"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: text for name, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}


def _qwen3(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: int, instruction: str) -> list[list[int]]:
    """What is cut is between the fixed parts, as the model card does it."""
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in (QWEN3_BEGIN, QWEN3_END))
    room = limit - len(begin) - len(end)
    if limit and room < 1:
        raise InvalidParameter("truncate_prompt_tokens", f"truncate_prompt_tokens must be above the {limit - room} "
                                                         "tokens of the reranker's own prompt.")
    prompts = []
    for query, document in pairs:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append([*begin, *(ids[:room] if limit else ids), *end])
    return prompts
