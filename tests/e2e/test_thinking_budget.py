"""Reasoning of a random model is ended by its budget, with steps that overlap and sequences that are preempted."""

from __future__ import annotations

import json

import pytest

from xllm_npu import LLM, SamplingParams
from xllm_npu.text.output_format import ModelHints, output_format

PROMPT, END = "Why? <think>", "</think>"
TAIL = 12  # tokens of an answer


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_tokens_than_the_budget(tiny_dir, overlap):
    format = output_format("hermes", "qwen3", ModelHints())
    budgets = [0, 1, 5, 30, 31, 40]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=budget + len(END) + TAIL,
                             grammar=_grammar(format.free_grammar(PROMPT, budget, (), True)))
              for i, budget in enumerate(budgets)]
    with LLM(str(tiny_dir), dtype="float32", num_threads=1, block_size=16, max_model_len=96, max_cache_size="64KiB",
             max_seqs_per_batch=6, enable_schedule_overlap=overlap) as llm:
        results = llm.generate([PROMPT] * len(budgets), params, use_tqdm=False)
        assert llm._engine.scheduler.stats.preemptions_total > 0
    for budget, result in zip(budgets, results, strict=True):
        [answer] = result.outputs
        texts = [llm.tokenizer.decode(answer.token_ids[:n], False) for n in range(len(answer.token_ids) + 1)]
        closed = next(n for n, text in enumerate(texts) if END in text)
        assert closed - len(END) <= budget  # in this vocabulary every byte is a token
        assert len(answer.token_ids) > closed or answer.finish_reason == "stop"


def _grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})
