"""What clients hear of the engine's steps: text, ends, aborts, counts."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from xllm_npu.master.output_dispatcher import OutputDispatcher
from xllm_npu.state.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    SEQUENCES_PER_REQUEST,
    AbortRequest,
    AddRequest,
    Finished,
    Logprobs,
    PromptInfo,
    StepOutputs,
    sequence_key,
)
from xllm_npu.state.repetition import RepetitionDetection
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One token for each byte, and </s>."""
    vocab = {t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return Tokenizer(path)


class Bench:
    """A dispatcher, what its clients heard, and what it told the engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self.aborts: list[AbortRequest] = []
        self.ended: list[int] = []
        self.dispatcher = OutputDispatcher(tokenizer, self._abort, self.ended.append)
        self.heard: dict[int, list] = {}

    def _abort(self, message: AbortRequest) -> None:
        assert not {key // SEQUENCES_PER_REQUEST for key in message.keys} & set(self.ended), "an abort after the end"
        self.aborts.append(message)

    def check_ends(self) -> None:
        """Every request that is over has been told of, once."""
        d = self.dispatcher
        assert len(set(self.ended)) == len(self.ended)
        assert set(self.ended).isdisjoint(d._requests.keys() | d._probes.keys())
        assert self.heard.keys() <= set(self.ended) | d._requests.keys() | d._probes.keys()

    def open(self, request_id=1, stream=True, prompt=(1, 2, 3), **params):
        request = AddRequest(
            request_id=request_id, external_id=f"r{request_id}", prompt=np.array(prompt, np.int32).tobytes(),
            params=SamplingParams(**params), arrival_time=0.0)  # fmt: skip
        outputs = self.heard[request_id] = []
        self.dispatcher.open(request, outputs.append, stream)
        return outputs

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def step(self, tokens=(), finished=(), **fields) -> None:
        """`tokens`: (request, sequence, token id or one character); `finished`: (request, sequence, reason, ...)"""
        keys = [sequence_key(r, i) for r, i, _ in tokens]
        ids = [t if isinstance(t, int) else self.ids(t)[0] for _, _, t in tokens]
        ends = [Finished(sequence_key(r, i), *rest) for r, i, *rest in finished]
        self.dispatcher.handle(StepOutputs(
            keys=np.array(keys, np.int64).tobytes(), tokens=np.array(ids, np.int32).tobytes(), finished=ends, **fields
        ))  # fmt: skip

    def say(self, text: str, request=1, sequence=0) -> None:
        for token in self.ids(text):
            self.step([(request, sequence, token)])


@pytest.fixture
def bench(tokenizer):
    bench = Bench(tokenizer)
    yield bench
    bench.check_ends()


def text_of(outputs, index=0) -> str:
    return "".join(d.text for o in outputs for d in o.deltas if d.index == index)


def ends_of(outputs) -> list[tuple]:
    return [(d.index, d.finish_reason, d.stop_reason) for o in outputs for d in o.deltas if d.finish_reason]


def test_streams_each_steps_news(bench):
    outputs = bench.open()
    bench.say("né")
    assert [o.deltas[0].text for o in outputs] == ["n", "", "é"]  # never half a character
    assert [o.deltas[0].token_ids for o in outputs] == [[i] for i in bench.ids("né")]
    assert [o.num_generated_tokens for o in outputs] == [1, 2, 3]
    assert not any(o.finished for o in outputs)
    bench.step([(1, 0, "!")], [(1, 0, FINISH_LENGTH)])
    assert outputs[-1].finished
    assert ends_of(outputs) == [(0, "length", None)]
    assert text_of(outputs) == "né!"
    assert outputs[-1].num_prompt_tokens == 3
    assert bench.dispatcher.open_requests == 0
    assert bench.aborts == []


def test_without_streaming_there_is_one_output_at_the_end(bench):
    outputs = bench.open(stream=False)
    bench.say("né")
    assert outputs == []
    bench.step([(1, 0, "!")], [(1, 0, FINISH_LENGTH)])
    (output,) = outputs
    assert (output.deltas[0].text, output.deltas[0].token_ids) == ("né!", bench.ids("né!"))
    assert (output.finished, output.num_generated_tokens) == (True, 4)


@pytest.mark.parametrize("stream", [True, False])
def test_eos_is_counted_and_not_shown(bench, stream):
    outputs = bench.open(stream=stream, skip_special_tokens=False)
    bench.say("ab")
    bench.step([(1, 0, bench.eos)], [(1, 0, FINISH_STOP, bench.eos)])
    assert text_of(outputs) == "ab"
    assert ends_of(outputs) == [(0, "stop", None)]
    assert [t for o in outputs for t in o.deltas[0].token_ids] == [*bench.ids("ab"), bench.eos]
    assert outputs[-1].num_generated_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_text(bench, stream, include, text):
    stop = bench.ids("b")[0]
    outputs = bench.open(stream=stream, stop_token_ids=(stop,), include_stop_str_in_output=include)
    bench.say("a")
    bench.step([(1, 0, stop)], [(1, 0, FINISH_STOP, stop)])
    assert text_of(outputs) == text
    assert ends_of(outputs) == [(0, "stop", stop)]


@pytest.mark.parametrize("stream", [True, False])
def test_included_eos_shows_only_if_special_tokens_do(tokenizer, stream):
    for skip, expected in ((True, "a"), (False, "a</s>")):
        bench = Bench(tokenizer)
        outputs = bench.open(stream=stream, include_stop_str_in_output=True, skip_special_tokens=skip)
        bench.say("a")
        bench.step([(1, 0, bench.eos)], [(1, 0, FINISH_STOP, bench.eos)])
        assert text_of(outputs) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_ends_the_sequence_and_tells_the_engine(bench, stream):
    outputs = bench.open(stream=stream, stop=("END", "zzz"))
    bench.say("xEEND")
    assert text_of(outputs) == "xE"
    assert ends_of(outputs) == [(0, "stop", "END")]
    assert outputs[-1].finished
    assert bench.aborts == [AbortRequest([sequence_key(1, 0)], FINISH_STOP)]
    count = len(outputs)
    bench.step([(1, 0, "q")])  # was in flight
    bench.step([], [(1, 0, FINISH_LENGTH)])
    assert len(outputs) == count
    assert bench.dispatcher.open_requests == 0


def test_held_back_text_is_shown_at_the_end(bench):
    outputs = bench.open(stop=("END",))
    bench.say("xEN")
    assert text_of(outputs) == "x"
    bench.step([(1, 0, bench.eos)], [(1, 0, FINISH_STOP, bench.eos)])
    assert text_of(outputs) == "xEN"
    assert ends_of(outputs) == [(0, "stop", None)]


def test_stop_string_in_the_last_allowed_token(bench):
    """The engine ends it for length in the same step: the stop string wins, and nothing needs aborting."""
    outputs = bench.open(stop=("b",))
    bench.step([(1, 0, "b")], [(1, 0, FINISH_LENGTH)])
    assert ends_of(outputs) == [(0, "stop", "b")]
    assert bench.aborts == []


def test_stop_string_in_what_is_flushed(bench):
    outputs = bench.open(stop=("�",))
    bench.step([(1, 0, bench.ids("é")[0])], [(1, 0, FINISH_LENGTH)])
    assert ends_of(outputs) == [(0, "stop", "�")]
    assert text_of(outputs) == ""


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xEND")])
def test_stop_string_included_on_request(bench, include, text):
    outputs = bench.open(stop=("END",), include_stop_str_in_output=include)
    bench.say("xEND")
    assert text_of(outputs) == text


def test_stop_strings_wait_for_min_tokens(bench):
    outputs = bench.open(stop=("a",), min_tokens=3)
    bench.say("aaa")
    assert not outputs[-1].finished
    bench.say("a")
    assert text_of(outputs) == "aaa"
    assert ends_of(outputs) == [(0, "stop", "a")]


def test_no_text_on_request(bench):
    outputs = bench.open(detokenize=False)
    bench.say("ab")
    bench.step([], [(1, 0, FINISH_LENGTH)])
    assert text_of(outputs) == ""
    assert [t for o in outputs for t in o.deltas[0].token_ids] == bench.ids("ab")


def test_several_sequences_share_an_output_a_step(bench):
    outputs = bench.open(n=3)
    bench.step([(1, 0, "a"), (1, 1, "b"), (1, 2, "c")])
    assert [(d.index, d.text) for d in outputs[0].deltas] == [(0, "a"), (1, "b"), (2, "c")]
    bench.step([(1, 2, "d"), (1, 0, "e")], [(1, 0, FINISH_LENGTH)])
    assert [(d.index, d.text, d.finish_reason) for d in outputs[1].deltas] == [(0, "e", "length"), (2, "d", None)]
    assert not outputs[1].finished
    bench.step([], [(1, 1, FINISH_ABORT), (1, 2, FINISH_LENGTH)])
    assert outputs[2].finished
    assert outputs[2].num_generated_tokens == 5
    assert [d.finish_reason for d in outputs[2].deltas] == ["abort", "length"]


def test_several_tokens_of_a_sequence_in_one_step(bench):
    outputs = bench.open()
    bench.step([(1, 0, "a"), (1, 0, "b"), (1, 0, bench.eos)], [(1, 0, FINISH_STOP, bench.eos)])
    assert len(outputs) == 1
    assert (text_of(outputs), len(outputs[0].deltas[0].token_ids)) == ("ab", 3)


def logprobs(token: int, value: float, *others: tuple[int, float]) -> Logprobs:
    ids, values = zip((token, value), *others)
    return Logprobs(list(ids), list(values), list(range(1, len(ids) + 1)))


def test_best_of_returns_the_likeliest_and_never_streams(bench):
    outputs = bench.open(n=2, best_of=3, logprobs=0)
    a, b, c = bench.ids("abc")
    for token, values in ((a, (-1.0, -2.5, -0.5)), (b, (-2.0, -2.5, -0.5)), (c, (-3.0, None, -0.5))):
        rows = {sequence_key(1, i): logprobs(token, v) for i, v in enumerate(values) if v is not None}
        bench.step([(1, i, token) for i, v in enumerate(values) if v is not None], logprobs=rows)
    assert outputs == []
    # Sequence 1 is shorter: it has the better sum, sequence 0 the better mean.
    bench.step([], [(1, i, FINISH_LENGTH) for i in range(3)])
    (output,) = outputs
    assert [(d.index, d.text) for d in output.deltas] == [(0, "abc"), (1, "abc")]
    assert [d.logprobs[0].chosen.logprob for d in output.deltas] == [-0.5, -1.0]
    assert output.num_generated_tokens == 8
    assert output.finished


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_come_with_texts_bytes_and_offsets(bench, stream):
    outputs = bench.open(stream=stream, logprobs=1)
    first, second = bench.ids("é")
    x, y = bench.ids("xy")
    for token, other in ((x, y), (first, x), (second, x), (y, x)):
        bench.step([(1, 0, token)], logprobs={sequence_key(1, 0): logprobs(token, -1.0, (token, -1.0), (other, -2.0))})
    bench.step([], [(1, 0, FINISH_LENGTH)])
    positions = [p for o in outputs for d in o.deltas for p in d.logprobs or []]
    assert [p.chosen.token for p in positions] == ["x", "�", "�", "y"]
    assert [p.chosen.bytes for p in positions] == [[120], [0xC3], [0xA9], [121]]
    assert [p.text_offset for p in positions] == [0, 1, 1, 2]
    assert [(t.token_id, t.logprob, t.rank) for t in positions[0].top] == [(x, -1.0, 2), (y, -2.0, 3)]
    assert text_of(outputs) == "xéy"


def test_prompt_facts_come_with_the_next_output(bench):
    outputs = bench.open()
    a, b = bench.ids("ab")
    rows = [None, logprobs(a, -1.0), logprobs(b, -2.0)]
    bench.step(prompts=[PromptInfo(1, num_cached_tokens=2, prompt_logprobs=rows), PromptInfo(99, 1)])
    assert outputs == []
    bench.say("xy")
    assert [o.num_cached_tokens for o in outputs] == [2, 2]
    assert outputs[0].prompt_logprobs[0] is None
    assert [p.chosen.token for p in outputs[0].prompt_logprobs[1:]] == ["a", "b"]
    assert [p.text_offset for p in outputs[0].prompt_logprobs[1:]] == [0, 1]
    assert outputs[1].prompt_logprobs is None


def test_close_aborts_what_is_unfinished(bench):
    outputs = bench.open(n=2)
    bench.step([(1, 0, "a")], [(1, 0, FINISH_LENGTH)])
    assert bench.dispatcher.close(1)
    assert bench.aborts == [AbortRequest([sequence_key(1, 1)], FINISH_ABORT)]
    assert not bench.dispatcher.close(1)
    bench.step([(1, 1, "a")], [(1, 1, FINISH_LENGTH)])
    assert len(outputs) == 1
    assert bench.dispatcher.open_requests == 0
    assert len(bench.aborts) == 1


def test_close_of_a_finished_or_unknown_request(bench):
    bench.open()
    bench.step([(1, 0, "a")], [(1, 0, FINISH_LENGTH)])
    assert not bench.dispatcher.close(1)
    assert not bench.dispatcher.close(77)
    assert bench.aborts == []


def test_an_error_ends_the_whole_request(bench):
    outputs, other = bench.open(n=2), bench.open(2)
    bench.step([(1, 0, "a"), (2, 0, "z")], [(1, 0, FINISH_ERROR, -1, "no room")])
    assert (outputs[-1].error, outputs[-1].finished) == ("no room", True)
    assert ends_of(outputs) == [(0, "error", None), (1, "error", None)]
    assert bench.aborts == [AbortRequest([sequence_key(1, 1)], FINISH_ABORT)]
    assert text_of(other) == "z"
    assert bench.dispatcher.open_requests == 1


LOOPS = RepetitionDetection(max_pattern_size=3, min_count=3)


@pytest.mark.parametrize("stream", [True, False])
def test_repetition_ends_the_sequence_and_tells_the_engine(bench, stream):
    outputs = bench.open(stream=stream, repetition_detection=LOOPS)
    bench.say("xababab!!")  # the engine was a step or two ahead
    assert text_of(outputs) == "xababab"
    assert ends_of(outputs) == [(0, "repetition", "repetition_detected")]
    assert (outputs[-1].finished, outputs[-1].num_generated_tokens) == (True, 7)
    assert bench.aborts == [AbortRequest([sequence_key(1, 0)], FINISH_STOP)]
    assert bench.dispatcher.open_requests == 0


def test_repetition_waits_for_min_tokens_and_gives_way_to_the_engines_end(bench):
    outputs = bench.open(repetition_detection=LOOPS, min_tokens=5)
    bench.say("aaaa")
    assert ends_of(outputs) == []
    bench.step([(1, 0, "a")], [(1, 0, FINISH_LENGTH)])
    assert ends_of(outputs) == [(0, "length", None)]
    outputs = bench.open(2, repetition_detection=LOOPS, min_tokens=5)
    bench.say("aaaaa", request=2)
    assert ends_of(outputs) == [(0, "repetition", "repetition_detected")]


def test_stream_interval_holds_tokens_back(bench):
    outputs = bench.open(stream_interval=3, n=2)
    for token in "abcdefgh":
        bench.step([(1, 0, token)])
    bench.step([(1, 1, "x")])
    assert [(o.deltas[0].index, o.deltas[0].text) for o in outputs] == [(0, "a"), (0, "bcd"), (0, "efg"), (1, "x")]
    bench.step([(1, 0, "i"), (1, 1, "y")], [(1, 1, FINISH_LENGTH)])
    assert [d.text for d in outputs[-1].deltas] == ["y"]
    bench.step([(1, 0, "j")], [(1, 0, FINISH_LENGTH)])
    assert text_of(outputs) == "abcdefghij"
    assert ends_of(outputs) == [(1, "length", None), (0, "length", None)]
    assert outputs[-1].finished


def probe(bench, request_id, heard):
    bench.dispatcher.open_probe(AddRequest(
        request_id=request_id, external_id="p", prompt=b"", params=SamplingParams(max_tokens=1, logprobs=2),
        arrival_time=0.0), heard.append)  # fmt: skip


def test_probes_hear_numbers_once(bench):
    heard = []
    for request_id in (1, 2):
        probe(bench, request_id, heard)
    assert bench.dispatcher.open_requests == 2
    measured = Logprobs([5, 5, 6], [-1.0, -1.0, -2.0], [1, 1, 2])
    bench.step([(1, 0, 5)], [(1, 0, FINISH_LENGTH)], logprobs={sequence_key(1, 0): measured},
               prompts=[PromptInfo(1, 3, prompt_logprobs=[None, Logprobs([5], [-3.0], [1])])])
    (result,) = heard
    assert (result.logprobs, result.num_cached_tokens, result.error) == (measured, 3, None)
    assert result.prompt_logprobs[1].chosen.logprob == -3.0
    assert bench.dispatcher.open_requests == 1
    assert bench.dispatcher.close(2)
    assert not bench.dispatcher.close(2)
    assert bench.aborts == [AbortRequest([sequence_key(2, 0)], FINISH_ABORT)]
    bench.step([(2, 0, 5)], [(2, 0, FINISH_LENGTH)])
    assert len(heard) == 1


def test_probes_hear_of_errors(bench):
    heard = []
    for request_id in (1, 2):
        probe(bench, request_id, heard)
    bench.step([], [(1, 0, FINISH_ERROR, -1, "too big")])
    bench.dispatcher.fail_all("gone")
    assert [r.error for r in heard] == ["too big", "gone"]
    assert bench.dispatcher.open_requests == 0


@pytest.mark.parametrize("stream", [True, False])
def test_fail_all(bench, stream):
    all_outputs = [bench.open(i, stream=stream) for i in (1, 2, 3)]
    bench.say("ab")
    bench.dispatcher.fail_all("the engine is gone")
    for outputs in all_outputs:
        assert (outputs[-1].error, outputs[-1].finished) == ("the engine is gone", True)
        assert ends_of(outputs) == [(0, "error", None)]
    assert text_of(all_outputs[0]) == "ab"
    assert bench.dispatcher.open_requests == 0
    assert bench.aborts == []


def test_one_listeners_fault_is_not_the_others(bench, caplog):
    bench.open(1)
    bench.dispatcher.close(1)
    bench.aborts.clear()
    request = AddRequest(request_id=5, external_id="bad", prompt=b"", params=SamplingParams(), arrival_time=0.0)
    bench.dispatcher.open(request, lambda output: 1 / 0, True)
    good = bench.open(2)
    with caplog.at_level(logging.ERROR):
        bench.step([(5, 0, "a"), (2, 0, "b")])
    assert "bad" in caplog.text
    assert text_of(good) == "b"
    assert bench.aborts == [AbortRequest([sequence_key(5, 0)], FINISH_ABORT)]
    assert bench.dispatcher.open_requests == 1


def test_a_listener_may_close_any_request(bench):
    heard = []

    def closer(output):
        heard.append(output)
        bench.dispatcher.close(1)
        bench.dispatcher.close(2)

    request = AddRequest(request_id=1, external_id="", prompt=b"", params=SamplingParams(), arrival_time=0.0)
    bench.dispatcher.open(request, closer, True)
    other = bench.open(2)
    bench.step([(1, 0, "a"), (2, 0, "b")])
    assert (len(heard), other) == (1, [])
    assert bench.dispatcher.open_requests == 0


TEXTS = st.text("abé你🎉", min_size=1, max_size=12)


STOPS = st.lists(st.text("abé", min_size=1, max_size=2), max_size=2)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), stops=STOPS, logprobs_too=st.booleans())
def test_streamed_and_whole_answers_are_the_same(tokenizer, texts, stops, logprobs_too):
    answers = []
    for stream in (True, False):
        bench = Bench(tokenizer)
        options = {"stop": tuple(stops), "n": len(texts), "logprobs": 0 if logprobs_too else None}
        outputs = bench.open(stream=stream, **options)
        for position in range(max(len(bench.ids(t)) for t in texts)):
            tokens = [(1, i, bench.ids(t)[position]) for i, t in enumerate(texts) if position < len(bench.ids(t))]
            last = [(1, i, FINISH_LENGTH) for i, t in enumerate(texts) if position == len(bench.ids(t)) - 1]
            rows = {sequence_key(r, i): logprobs(t, -1.0) for r, i, t in tokens} if logprobs_too else {}
            bench.step(tokens, last, logprobs=rows)
        assert outputs[-1].finished
        assert [o.finished for o in outputs[:-1]] == [False] * (len(outputs) - 1)
        parts = [text_of(outputs, i) for i in range(len(texts))]
        positions = [p for o in outputs for d in o.deltas for p in d.logprobs or []]
        answers.append((parts, sorted(ends_of(outputs)), outputs[-1].num_generated_tokens, len(positions)))
    assert answers[0] == answers[1]
    for text, shown in zip(texts, answers[0][0]):
        assert text.startswith(shown)
        assert shown == text or any(s in text for s in stops)


def test_an_operator_ends_requests_with_what_they_have(bench):
    heard = []
    streamed, whole, kept = bench.open(1, n=2), bench.open(2, stream=False), bench.open(3)
    probe(bench, 4, heard)
    bench.step([(1, 0, "a"), (2, 0, "b"), (3, 0, "c")], [(1, 0, FINISH_LENGTH)])
    assert bench.dispatcher.abort(lambda id: id in ("r1", "r2", "unknown")) == 2
    assert ends_of(streamed) == [(0, "length", None), (1, "abort", None)]
    assert (text_of(whole), ends_of(whole)) == ("b", [(0, "abort", None)])
    assert (ends_of(kept), heard) == ([], [])
    assert [(sorted(a.keys), a.reason) for a in bench.aborts] == [
        ([sequence_key(1, 1), sequence_key(2, 0)], FINISH_ABORT)]
    assert bench.dispatcher.abort(lambda id: True) == 2
    assert (ends_of(kept), heard[0].error) == ([(0, "abort", None)], "The request was ended by the server's operator.")
    assert bench.dispatcher.abort(lambda id: True) == bench.dispatcher.open_requests == 0
