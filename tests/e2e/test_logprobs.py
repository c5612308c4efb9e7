"""Log probabilities equal transformers', for generated tokens and for the prompt, through chunks and a prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from xllm_npu import LLM, SamplingParams


@pytest.fixture(scope="module")
def model(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    options = {"max_tokens_per_batch": 32, "max_tokens_per_chunk_for_prefill": 16, "block_size": 16}
    options |= {"dtype": "float32", "num_threads": 1, "max_cache_size": "16MiB", "max_model_len": 512}
    with LLM(str(tiny_dir), **options) as llm:
        yield llm


def expected(model, tokens):
    """[positions, vocab]: row i is about token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)


def prompt_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


@pytest.mark.parametrize("length", [2, 16, 33, 70])
def test_prompt_logprobs(llm, model, length):
    prompt = prompt_of(length)
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # its blocks are cached now
    result = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3), use_tqdm=False)[0]
    rows = result.prompt_logprobs
    assert rows[0] is None
    assert len(rows) == length
    wanted = expected(model, prompt)
    for i in range(1, length):
        assert rows[i][prompt[i]].logprob == pytest.approx(wanted[i - 1, prompt[i]].item(), abs=1e-4)
        top = wanted[i - 1].topk(3).values.tolist()
        assert sorted((e.logprob for e in rows[i].values()), reverse=True)[:3] == pytest.approx(top, abs=1e-4)


def test_generated_logprobs_and_their_ranks(llm, model):
    prompt = prompt_of(20, seed=1)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=4, logprob_token_ids=(65, 66))
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    wanted = expected(model, prompt + output.token_ids)[len(prompt) - 1 :]
    total = 0.0
    for i, token in enumerate(output.token_ids):
        entry = output.logprobs[i]
        assert entry[token].logprob == pytest.approx(wanted[i, token].item(), abs=1e-4)
        assert entry[token].rank == int((wanted[i] > wanted[i, token]).sum()) + 1
        assert {65, 66, *wanted[i].topk(4).indices.tolist()} <= set(entry)
        total += entry[token].logprob
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(llm):
    prompt, params = prompt_of(9, seed=2), SamplingParams(temperature=1.0, seed=11, max_tokens=16, top_p=0.9)
    alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    others = [prompt_of(n, seed=n) for n in (3, 40, 17, 60)]
    together = llm.generate([*others, prompt], [SamplingParams(temperature=1.0, max_tokens=20)] * 4 + [params],
                            use_tqdm=False)[-1].outputs[0].token_ids
    assert together == alone


def test_siblings_differ_and_best_of_returns_the_likeliest(llm):
    prompt = prompt_of(18, seed=3)
    many = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8, logprobs=0),
                        use_tqdm=False)[0].outputs
    assert len({tuple(o.token_ids) for o in many}) == 4
    best = llm.generate([prompt], SamplingParams(n=1, best_of=4, temperature=1.0, seed=1, max_tokens=8),
                        use_tqdm=False)[0].outputs
    likeliest = max(many, key=lambda o: o.cumulative_logprob / len(o.token_ids))
    assert [o.token_ids for o in best] == [likeliest.token_ids]
