"""Takes the engine's step outputs apart and brings each client its own, as text: one output a request and step.

Synchronous and without a loop of its own: the server calls `handle` from its event loop, `LLM` from its own
loop; all calls come from one thread. What the engine sends for sequences that are closed here already (a step
was in flight when a stop string was found or a client left) is ignored. Knows neither HTTP nor scheduling.

Cost of `handle` on one core of a small server: 0.25 ms for 256 streaming sequences with a token each, 0.3 ms with
stop strings, 0.04 ms if none of them streams, 1 ms with five logprobs a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xllm_npu.master.sequence_output import SequenceOutput, position_logprobs
from xllm_npu.state.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
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
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta
from xllm_npu.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PLAIN_ERROR = "The server failed to generate this request."
# Why a probe has measured nothing.
ENDINGS = {FINISH_ERROR: PLAIN_ERROR, FINISH_ABORT: "The request was ended by the server's operator."}

Sink = Callable[[RequestOutput], None]
ProbeSink = Callable[["ProbeResult"], None]


class _Request:
    """An open request: its sequences and what its next output will say."""

    __slots__ = (
        "error",
        "num_cached",
        "num_prompt",
        "open",
        "prompt_logprobs",
        "request",
        "sequences",
        "sink",
        "stream",
        "touched",
        "vector",
    )

    def __init__(self, request: AddRequest, sink: Sink, stream: bool) -> None:
        self.request = request
        self.sink = sink
        self.stream = stream
        self.num_prompt = len(request.prompt) // 4
        self.num_cached = 0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.error: str | None = None
        self.sequences: list[SequenceOutput] = []
        self.open = 0  # sequences that have not finished
        self.vector: bytes | None = None
        self.touched = False  # has news in this step

    @property
    def chooses(self) -> bool:
        """More sequences are generated than returned."""
        return self.request.params.num_sequences > self.request.params.n


@dataclass(slots=True)
class ProbeResult:
    """What a request for one token measured; no text is made of it."""

    logprobs: Logprobs | None = None  # at the one position; None after an error
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None


@dataclass(slots=True)
class _Probe:
    sink: ProbeSink
    result: ProbeResult
    external_id: str


class OutputDispatcher:
    """All open requests of one client process."""

    def __init__(
        self, tokenizer: Tokenizer, abort: Callable[[AbortRequest], None],
        ended: Callable[[int], object] = lambda request_id: None,
    ) -> None:
        """`ended` hears once of every request that is over, with its id, after its abort if there was one."""
        self._tokenizer = tokenizer
        self._abort, self._ended = abort, ended
        self._requests: dict[int, _Request] = {}
        self._sequences: dict[int, tuple[_Request, SequenceOutput]] = {}  # those that have not finished
        self._probes: dict[int, _Probe] = {}  # by request id

    @property
    def open_requests(self) -> int:
        return len(self._requests) + len(self._probes)

    def open(self, request: AddRequest, sink: Sink, stream: bool) -> None:
        """Bring `request`'s outputs to `sink`: each step's news or, without `stream`, everything at the end.

        A request that generates more sequences than it returns is never streamed. Call it before the engine
        gets the request.
        """
        params = request.params
        entry = _Request(request, sink, stream)
        entry.stream = stream and not entry.chooses
        prompt = request.prompt_token_ids.tolist() if self._tokenizer.prompt_matters else []
        for index in range(params.num_sequences):
            key = sequence_key(request.request_id, index)
            detokenizer = (
                self._tokenizer.detokenizer(
                    prompt, params.skip_special_tokens, params.spaces_between_special_tokens,
                    params.shown_special_tokens,
                )
                if params.detokenize
                else None
            )
            output = SequenceOutput(key, index, params, self._tokenizer, detokenizer, late=not entry.stream)
            entry.sequences.append(output)
            self._sequences[key] = (entry, output)
        entry.open = len(entry.sequences)
        self._requests[request.request_id] = entry

    def open_probe(self, request: AddRequest, sink: ProbeSink) -> None:
        """Bring the logprobs of `request`'s one token to `sink`, once; it must not raise. `close` as any request."""
        assert (request.params.max_tokens, request.params.num_sequences) == (1, 1)
        self._probes[request.request_id] = _Probe(sink, ProbeResult(), request.external_id)

    def close(self, request_id: int) -> bool:
        """The client left: no more outputs, and the engine stops what is unfinished. False if it was over
        already.
        """
        if self._probes.pop(request_id, None) is not None:
            self._abort(AbortRequest([sequence_key(request_id, 0)], FINISH_ABORT))
            self._ended(request_id)
            return True
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return False
        keys = self._forget(entry)
        if keys:
            self._abort(AbortRequest(keys, FINISH_ABORT))
        self._ended(request_id)
        return True

    def abort(self, wanted: Callable[[str], bool]) -> int:
        """End requests, chosen by their external ids, with what they have so far; how many there were."""
        chosen = [entry for entry in self._requests.values() if wanted(entry.request.external_id)]
        keys = [s.key for entry in chosen for s in entry.sequences if not s.finished]
        probes = [request_id for request_id, probe in self._probes.items() if wanted(probe.external_id)]
        keys += [sequence_key(request_id, 0) for request_id in probes]
        if keys:
            self._abort(AbortRequest(keys, FINISH_ABORT))
            self.handle(StepOutputs(finished=[Finished(key, FINISH_ABORT) for key in keys]))
        return len(chosen) + len(probes)

    def fail_all(self, message: str) -> None:
        """The engine is gone: every open request ends with an error."""
        for entry in list(self._requests.values()):
            self._fail(entry, message)
            self._deliver(entry)
        for request_id in list(self._probes):
            self._end_probe(request_id, None, message)

    def handle(self, outputs: StepOutputs) -> None:
        """One step's news to everybody it concerns; then one abort for all that end by it here."""
        touched: list[_Request] = []
        stopped: list[int] = []  # keys that their text ended and the engine still runs
        for info in outputs.prompts:
            self._take_prompt(info)
        ends = {end.key: end for end in outputs.finished}
        self._take_tokens(outputs, ends, touched, stopped)
        for end in outputs.finished:
            found = self._sequences.get(end.key)
            if found is not None:
                entry, output = found
                entry.vector = outputs.vectors.get(end.key)
                _touch(entry, touched)
                self._finish(entry, output, end)
        if stopped:
            self._abort(AbortRequest(stopped, FINISH_STOP))
        for entry in touched:
            entry.touched = False
            if entry.open == 0 or (entry.stream and _is_due(entry)):
                self._deliver(entry)
        if self._probes:
            for end in outputs.finished:
                error = end.message or ENDINGS[end.reason] if end.reason in ENDINGS else None
                self._end_probe(end.key // SEQUENCES_PER_REQUEST, outputs.logprobs.get(end.key), error)

    def _end_probe(self, request_id: int, logprobs: Logprobs | None, error: str | None) -> None:
        probe = self._probes.pop(request_id, None)
        if probe is None:
            return
        self._ended(request_id)
        probe.result.logprobs, probe.result.error = logprobs, error
        probe.sink(probe.result)

    def _take_tokens(
        self, outputs: StepOutputs, ends: dict[int, Finished], touched: list[_Request], stopped: list[int]
    ) -> None:
        sequences, logprobs = self._sequences, outputs.logprobs
        for key, token_id in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
            found = sequences.get(key)
            if found is None:
                continue
            entry, output = found
            if not entry.touched:
                entry.touched = True
                touched.append(entry)
            end = ends.get(key) if ends else None
            ends_here = end is not None and end.stop_token_id == token_id
            ended = output.add(token_id, logprobs.get(key) if logprobs else None, ends_here)
            if ended or (end is None and output.repeats(token_id)):
                self._retire(entry, output)
                if end is None:
                    stopped.append(key)

    def _take_prompt(self, info: PromptInfo) -> None:
        rows = info.prompt_logprobs
        if (entry := self._requests.get(info.request_id)) is not None:
            entry.num_cached = info.num_cached_tokens
            entry.prompt_logprobs = None if rows is None else self._prompt_logprobs(rows)
        elif (probe := self._probes.get(info.request_id)) is not None:
            probe.result.num_cached_tokens = info.num_cached_tokens
            probe.result.prompt_logprobs = None if rows is None else self._prompt_logprobs(rows)

    def _prompt_logprobs(self, rows: list[Logprobs | None]) -> list[PositionLogprobs | None]:
        result: list[PositionLogprobs | None] = []
        offset = 0
        for row in rows:
            position = None if row is None else position_logprobs(self._tokenizer, row, offset)
            result.append(position)
            offset += 0 if position is None else len(position.chosen.token)
        return result

    def _finish(self, entry: _Request, output: SequenceOutput, end: Finished) -> None:
        """The engine ended a sequence. An error of one sequence ends its request."""
        output.finish(end)
        self._retire(entry, output)
        if end.reason == FINISH_ERROR:
            others = [s.key for s in entry.sequences if not s.finished]
            if others:
                self._abort(AbortRequest(others, FINISH_ABORT))
            self._fail(entry, end.message or PLAIN_ERROR)

    def _fail(self, entry: _Request, message: str) -> None:
        entry.error = message
        for output in entry.sequences:
            if not output.finished:
                output.finish(Finished(output.key, FINISH_ERROR))
                self._retire(entry, output)

    def _retire(self, entry: _Request, output: SequenceOutput) -> None:
        del self._sequences[output.key]
        entry.open -= 1

    def _forget(self, entry: _Request) -> list[int]:
        """Drop the request's sequences; returns the keys of those that have not finished."""
        keys = [s.key for s in entry.sequences if not s.finished]
        for key in keys:
            del self._sequences[key]
        return keys

    def _deliver(self, entry: _Request) -> None:
        """One output with all the news of a request."""
        request_id = entry.request.request_id
        if request_id not in self._requests:
            return  # closed by a sink that was called before this one
        finished = entry.open == 0
        if finished:
            del self._requests[request_id]
            self._ended(request_id)
        sequences = entry.sequences
        output = RequestOutput(
            request_id,
            _deltas(entry),
            entry.num_prompt,
            entry.num_cached,
            sequences[0].num_tokens if len(sequences) == 1 else sum(s.num_tokens for s in sequences),
            finished,
            entry.prompt_logprobs,
            entry.vector,
            entry.error,
        )
        entry.prompt_logprobs = None
        try:
            entry.sink(output)
        except Exception:  # one client's fault must not end the others' streams
            log.exception(
                "Request %s: its listener failed; the request is aborted.", entry.request.external_id
            )
            self.close(request_id)


def _touch(entry: _Request, touched: list[_Request]) -> None:
    if not entry.touched:
        entry.touched = True
        touched.append(entry)


def _is_due(entry: _Request) -> bool:
    return entry.request.params.stream_interval == 1 or any(s.has_enough_news for s in entry.sequences)


def _deltas(entry: _Request) -> list[SequenceDelta]:
    if entry.chooses:
        return _best(entry.sequences, entry.request.params.n)
    if len(entry.sequences) == 1:
        return [entry.sequences[0].take()]
    if entry.stream and entry.open:
        return [s.take() for s in entry.sequences if s.has_enough_news]
    return [s.take() for s in entry.sequences if s.has_news]


def _best(sequences: Iterable[SequenceOutput], n: int) -> list[SequenceDelta]:
    """The n with the highest mean logprob, best first, numbered anew."""
    ranked = sorted(sequences, key=lambda s: -s.mean_logprob)[:n]
    deltas = [s.take() for s in ranked]
    for index, delta in enumerate(deltas):
        delta.index = index
    return deltas
