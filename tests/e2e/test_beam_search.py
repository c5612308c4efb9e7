"""Beam search equals transformers' where both have the same rules, and everywhere a plain search over the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from xllm_npu import LLM, BeamSearchParams, SamplingParams
from xllm_npu.state.sampling_params import InvalidParameter

EOS = 258  # <|im_end|>
OPTIONS = {"block_size": 16, "dtype": "float32", "num_threads": 1, "max_cache_size": "16MiB", "max_model_len": 512}


@pytest.fixture(scope="module")
def model(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    with LLM(str(tiny_dir), **OPTIONS) as llm:
        assert llm.info.eos_token_ids == [EOS]
        yield llm


def prompt_of(n, seed):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def plain_search(model, prompt, width, max_tokens, length_penalty=1.0, stops=(EOS,), min_tokens=0):
    """[(tokens, cumulative logprob)], best first: the rules as vLLM has them, without any thrift."""
    live, ended = [((), 0.0)], []
    for step in range(max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens] for tokens, _ in live])).logits[:, -1].float()
        rows = torch.log_softmax(logits, dim=-1).topk(width + max(width, len(stops)))
        found = [((*tokens, token), total + logprob)
                 for (tokens, total), ids, values in zip(live, rows.indices.tolist(), rows.values.tolist())
                 for token, logprob in zip(ids, values)]
        if step >= min_tokens:
            ended += [f for f in found if f[0][-1] in stops]
        live = sorted((f for f in found if f[0][-1] not in stops), key=lambda f: -f[1])[:width]

    def score(beam):
        tokens, total = beam
        return total / (len(prompt) + len(tokens) - (tokens[-1] in stops)) ** length_penalty

    return sorted([*ended, *live], key=lambda f: -score(f))[:width]


def check(result, wanted):
    assert [o.index for o in result.outputs] == list(range(len(wanted)))
    assert [tuple(o.token_ids) for o in result.outputs] == [tokens for tokens, _ in wanted]
    for output, (tokens, total) in zip(result.outputs, wanted):
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert len(output.logprobs) == len(tokens)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 15, 33])
def test_equals_transformers_without_eos(llm, model, width, length):
    prompt = prompt_of(length, seed=length)
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=20,
            eos_token_id=None, pad_token_id=0, length_penalty=0.7)
    result = llm.beam_search([prompt], BeamSearchParams(
        beam_width=width, max_tokens=20, ignore_eos=True, length_penalty=0.7), use_tqdm=False)[0]
    assert [o.token_ids for o in result.outputs] == wanted[:, length:].tolist()
    assert {o.finish_reason for o in result.outputs} == {"length"}


def likely_stops(model, prompt, count):
    """Tokens that a search really comes across."""
    beams = plain_search(model, prompt, 4, 8, stops=())
    return tuple(sorted({beams[i % 4][0][2 + i] for i in range(count)}))


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_stops_equal_the_plain_search(llm, model, seed, length_penalty):
    prompt = prompt_of(10 + seed, seed)
    stops = likely_stops(model, prompt, 3)
    wanted = plain_search(model, prompt, 4, 14, length_penalty, stops=(*stops, EOS))
    assert any(tokens[-1] in stops for tokens, _ in wanted) or length_penalty > 1
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=14, length_penalty=length_penalty,
                            stop_token_ids=stops, logprobs=2)
    result = llm.generate([prompt], params, use_tqdm=False)[0]
    check(result, wanted)
    for output in result.outputs:
        stopped = output.token_ids[-1] in stops
        assert (output.finish_reason, output.stop_reason) == (
            ("stop", output.token_ids[-1]) if stopped else ("length", None))
        shown = output.token_ids[:-1] if stopped else output.token_ids
        assert output.text == llm.tokenizer.decode(shown)
        assert all(2 <= len(row) <= 3 for row in output.logprobs)


@pytest.mark.parametrize("seed", range(5, 9))
def test_the_best_answer_with_a_stop_token_is_transformers(llm, model, seed):
    """With length_penalty 0 both searches are the textbook's."""
    prompt = prompt_of(12, seed)
    stop = plain_search(model, prompt, 3, 6, stops=())[0][0][3]
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([prompt]), num_beams=3, do_sample=False, max_new_tokens=12, eos_token_id=stop,
            pad_token_id=0, length_penalty=0.0, early_stopping="never")[0, 12:].tolist()
    assert stop in wanted
    params = SamplingParams(use_beam_search=True, n=1, best_of=3, max_tokens=12, length_penalty=0.0,
                            stop_token_ids=(stop,), ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == wanted[: wanted.index(stop) + 1]


def test_min_tokens_hold_stops_back(llm, model):
    prompt = prompt_of(9, seed=7)
    stops = likely_stops(model, prompt, 2)
    wanted = plain_search(model, prompt, 3, 10, 0.0, stops=(*stops, EOS), min_tokens=5)
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=10, length_penalty=0.0, stop_token_ids=stops,
                            min_tokens=5, logprobs=0)
    check(llm.generate([prompt], params, use_tqdm=False)[0], wanted)


def test_best_of_is_the_width_and_n_are_returned(llm, model):
    prompt = prompt_of(20, seed=8)
    params = SamplingParams(use_beam_search=True, n=2, best_of=6, max_tokens=9, logprobs=0, prompt_logprobs=1)
    result = llm.generate([prompt], params, use_tqdm=False)[0]
    check(result, plain_search(model, prompt, 6, 9)[:2])
    assert len(result.prompt_logprobs) == 20


def test_many_searches_and_others_in_a_small_cache(tiny_dir, model):
    """A few blocks: beams wait for each other and preempt; the answers are the same, and nothing is left."""
    prompts = [prompt_of(n, seed=n) for n in (5, 30, 18)]
    small = {**OPTIONS, "max_model_len": 64, "max_cache_size": "64KiB", "max_seqs_per_batch": 4}
    with LLM(str(tiny_dir), **small) as llm:
        assert llm.info.num_kv_blocks < 9
        beams = SamplingParams(use_beam_search=True, n=5, max_tokens=8, logprobs=0)
        greedy = SamplingParams(temperature=0, max_tokens=12)
        results = llm.generate([*prompts, prompts[0]], [beams] * 3 + [greedy], use_tqdm=False)
        for prompt, result in zip(prompts, results):
            check(result, plain_search(model, prompt, 5, 8))
        assert len(results[3].outputs[0].token_ids) == 12
        loop = llm._engine
        loop.scheduler.check_integrity()
        assert loop.scheduler.running.blocks.pool.num_used == 0


def test_scores_are_finite_and_sorted(llm):
    outputs = llm.beam_search(["Hello"], BeamSearchParams(beam_width=64, max_tokens=3), use_tqdm=False)[0].outputs
    totals = [o.cumulative_logprob for o in outputs]
    assert len(outputs) == 64
    assert all(map(math.isfinite, totals))
    assert totals == sorted(totals, reverse=True)
    with pytest.raises(InvalidParameter, match="at most 64, got 65"):
        llm.beam_search(["Hello"], BeamSearchParams(beam_width=65, max_tokens=3))
