"""Decoding under a grammar, through the whole engine: token for token what a plain loop chooses."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.constrained_decoding import ConstrainedDecoding
from xllm_npu.master import engine_loop
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import FINISH_ERROR, FINISH_STOP, SEQUENCES_PER_REQUEST, AddRequest, Finished
from xllm_npu.state.output import GRAMMAR_TOO_COMPLEX
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import MatcherFactory

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_to_id(EOS)
MAX_TOKENS = 120
PERSON = structured_output.json_schema({
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c<|im_end|>"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}, whitespace="[ ]?")
GRAMMARS = [
    PERSON, None, structured_output.regex(r"[a-f]{3,9}(-\d{2}){1,3}"),
    structured_output.choice(["yes, certainly", "no", "perhaps"]),
    structured_output.lark('start: word (" " word)~2..6 "."\nword: /[a-z]{1,7}/'),
]  # fmt: skip


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def plain_loop(
    model, matchers: MatcherFactory, prompt: list[int], grammar: str | None, max_tokens: int = MAX_TOKENS
) -> list[int]:
    """The whole sequence anew for each token; the likeliest of those that the matcher allows."""
    matcher = None if grammar is None else matchers.matcher(grammar)
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != EOS_ID):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].float().numpy()
        if matcher is not None:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            logits[bits[: len(logits)] == 0] = -np.inf
        output.append(int(logits.argmax()))
        if matcher is not None:
            assert matcher.consume_token(output[-1])
    return output


class Run:
    """An engine in this process, and what became of its requests."""

    def __init__(self, model: Path, **settings) -> None:
        options = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1, **settings}
        self.loop = EngineLoop.create(settings_from_kwargs(model=str(model), **options))
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_) -> None:
        self.loop.close()

    def submit(self, request_id: int, prompt: list[int], **params) -> None:
        self.loop.submit(AddRequest(
            request_id=request_id, external_id=str(request_id), prompt=np.array(prompt, np.int32).tobytes(),
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params}),
            arrival_time=time.time()))

    def step(self) -> None:
        outputs = self.loop.step()
        if outputs is not None:
            for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
                self.tokens.setdefault(key, []).append(token)
            self.finished.update({f.key: f for f in outputs.finished})

    def finish(self) -> Run:
        while self.loop.has_work():
            self.step()
        self.loop.scheduler.check_integrity()
        assert self.loop.scheduler.running.blocks.pool.num_used == 0
        return self

    def output(self, request_id: int, index: int = 0) -> list[int]:
        return self.tokens[request_id * SEQUENCES_PER_REQUEST + index]

    def reason(self, request_id: int, index: int = 0) -> int:
        return self.finished[request_id * SEQUENCES_PER_REQUEST + index].reason


@pytest.fixture(scope="module")
def matchers() -> MatcherFactory:
    return MatcherFactory(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [EOS_ID])


@pytest.fixture(scope="module")
def cases(tiny_dir, matchers) -> list[tuple[list[int], str | None, list[int]]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    prompts = [list(range(65, 65 + n)) for n in (5, 40, 23, 17, 30, 61)]
    chosen = [GRAMMARS[i % len(GRAMMARS)] for i in range(len(prompts))]
    return [(p, g, plain_loop(model, matchers, p, g)) for p, g in zip(prompts, chosen)]


LOOPS = {
    "overlapped": {}, "plain": {"enable_schedule_overlap": False},
    "chunked": {"max_tokens_per_batch": 16, "max_tokens_per_chunk_for_prefill": 8},
    "without prefix cache": {"enable_prefix_cache": False},
    "two ranks": {"tp_size": 2}, "preempting": {"max_cache_size": "112KiB"},
}  # fmt: skip


TWO_RANKS = pytest.param("two ranks", marks=[pytest.mark.multiprocess, pytest.mark.slow])


@pytest.mark.parametrize("name", [*(name for name in LOOPS if name != "two ranks"), TWO_RANKS])
def test_greedy_output_is_that_of_a_plain_loop(tiny_dir, cases, name):
    with Run(tiny_dir, **LOOPS[name]) as run:
        for round in range(2):  # the second one finds its prompts in the prefix cache
            for i, (prompt, grammar, _) in enumerate(cases):
                run.submit(100 * round + i, prompt, grammar=grammar)
            run.finish()
            for i, (_, grammar, expected) in enumerate(cases):
                assert run.output(100 * round + i) == expected, f"case {i}, round {round}"
                if grammar is not None:
                    assert run.reason(100 * round + i) == FINISH_STOP
        if name == "preempting":
            assert run.loop.scheduler.stats.preemptions_total > 0
    person = json.loads(text_of(cases[0][2]))
    assert set(person) == {"name", "age", "tags"}


def test_what_else_forbids_tokens_narrows_a_grammar_and_never_empties_it(tiny_dir):
    """min_tokens, ignore_eos, allowed_token_ids, bad_words, logit_bias and stop tokens beside a grammar."""
    three = structured_output.regex("[ab]{3}")
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    with Run(tiny_dir) as run:
        prompt = [70, 71, 72]
        run.submit(1, prompt, grammar=three, min_tokens=20)
        run.submit(2, prompt, grammar=three, ignore_eos=True)
        run.submit(3, prompt, grammar=three, allowed_token_ids=(b,))
        run.submit(4, prompt, grammar=three, bad_words_token_ids=((a,),))
        run.submit(5, prompt, grammar=three, logit_bias={b: 100.0})
        run.submit(6, prompt, grammar=three, allowed_token_ids=(200,), bad_words_token_ids=((a,), (b,)))
        run.submit(7, prompt, grammar=structured_output.regex("[ab]{2,9}"), min_tokens=7, logit_bias={EOS_ID: 100.0})
        run.submit(8, prompt, grammar=structured_output.regex("ab+"), stop_token_ids=(b,), min_tokens=6)
        run.finish()
        for i in (1, 2, 6):
            assert len(text_of(run.output(i))) == 3, i
            assert set(text_of(run.output(i))) <= {"a", "b"}
            assert run.output(i)[-1] == EOS_ID, i
        for i in (3, 4, 5):
            assert text_of(run.output(i)) == "bbb"
        assert len(run.output(7)) == 8
        assert run.output(8) == [a, b]  # the grammar leaves only a stop token, which ends it
        assert {run.reason(i) for i in range(1, 9)} == {FINISH_STOP}


def test_each_sequence_of_a_request_has_a_matcher(tiny_dir):
    """n > 1, random: the siblings differ, and each matches."""
    import re

    pattern = r"[a-z]{4}-\d{3}"
    with Run(tiny_dir) as run:
        run.submit(1, [80, 81, 82], grammar=structured_output.regex(pattern), n=8, temperature=1.0, seed=3)
        run.finish()
        texts = [text_of(run.output(1, i)) for i in range(8)]
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(set(texts)) > 4


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(tiny_dir):
    with Run(tiny_dir) as run:
        run.submit(1, [80, 81], grammar='{"grammars":[{"lark_grammar":"start: nothing"}]}', n=2)
        run.submit(2, [80, 81], grammar=structured_output.regex("ok"))
        run.submit(3, [80, 81], max_tokens=3)
        run.finish()
        assert {run.reason(1, i) for i in range(2)} == {FINISH_ERROR}
        assert "nothing" in run.finished[SEQUENCES_PER_REQUEST].message
        assert text_of(run.output(2)) == "ok"
        assert len(run.output(3)) == 3


def test_requests_leave_while_their_grammar_is_compiled(tiny_dir):
    """Whether the lead goes, a sibling, or all; before the tokenizer's tables are there."""
    from xllm_npu.state.messages import FINISH_ABORT, AbortRequest, sequence_key

    grammar = structured_output.regex("x{5}")
    with Run(tiny_dir) as run:
        for i in (1, 2, 3):
            run.submit(i, [80, 81], grammar=grammar, n=3)
        assert run.loop.scheduler.stats.steps_total == 0
        run.loop.submit(AbortRequest([sequence_key(1, 0)], FINISH_ABORT))
        run.loop.submit(AbortRequest([sequence_key(2, 1)], FINISH_ABORT))
        run.loop.submit(AbortRequest([sequence_key(3, i) for i in range(3)], FINISH_ABORT))
        run.loop.scheduler.check_integrity()
        run.finish()
    assert set(run.tokens) == {sequence_key(1, 1), sequence_key(1, 2), sequence_key(2, 0), sequence_key(2, 2)}


def test_others_go_on_while_a_grammar_is_compiled(tiny_dir, monkeypatch):
    """The tables of the tokens take their time; who needs none does not wait for them."""
    real, may_load = engine_loop._grammar_compiler, threading.Event()

    def slow(*args):
        assert may_load.wait(60)
        return real(*args)

    monkeypatch.setattr(engine_loop, "_grammar_compiler", slow)
    with Run(tiny_dir) as run:
        run.submit(1, [80, 81], grammar=structured_output.regex("ok"))
        run.submit(2, [80, 81], max_tokens=9)
        while 2 * SEQUENCES_PER_REQUEST not in run.finished:
            run.step()
        assert SEQUENCES_PER_REQUEST not in run.tokens
        assert run.loop.has_work()
        may_load.set()
        run.finish()
        assert text_of(run.output(1)) == "ok"


def test_a_sequence_whose_grammar_fails_ends_alone(tiny_dir, monkeypatch):
    """As where a step would cost the parser more than it may."""
    real, steps = ConstrainedDecoding.accept, []

    def failing(self, tokens):
        failures = real(self, tokens)
        steps.append(tokens.size)
        return {0: GRAMMAR_TOO_COMPLEX} if len(steps) == 5 else failures

    monkeypatch.setattr(ConstrainedDecoding, "accept", failing)
    with Run(tiny_dir) as run:
        for i in (1, 2):
            run.submit(i, [80, 81 + i], grammar=structured_output.regex("[a-z]{20}"))
        run.finish()
        reasons = {i: run.reason(i) for i in (1, 2)}
        [failed] = [i for i, reason in reasons.items() if reason == FINISH_ERROR]
        assert run.finished[failed * SEQUENCES_PER_REQUEST].message == GRAMMAR_TOO_COMPLEX
        assert len(text_of(run.output(3 - failed))) == 20
