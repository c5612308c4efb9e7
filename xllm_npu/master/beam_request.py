"""A request with beam search: the engine measures its live beams' next tokens, by one ordinary request for each.

Everything the engine does for requests holds for these: queueing, batching, preemption, and the prefix cache, which
makes all but a beam's last block free. One request to whoever asked: `on_end` hears once that it is over, and `output`
is then what to say. Works on the thread of the dispatcher, whose calls it answers. Knows nothing of who asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from xllm_npu.master.beams import Beam, Beams
from xllm_npu.master.output_dispatcher import PLAIN_ERROR, OutputDispatcher, ProbeResult
from xllm_npu.master.sequence_output import SequenceOutput
from xllm_npu.state.messages import FINISH_LENGTH, FINISH_STOP, AddRequest, Finished, Logprobs
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.state.stopping import stop_token_ids
from xllm_npu.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class BeamRequest:
    """`start` it once; `close` ends it early and in silence.

    `message`: the request as the factory made it; it never reaches the engine. `send` brings a request to the engine,
    `new_id` makes ids for them; the first has the message's own.
    """

    def __init__(
        self, message: AddRequest, eos_token_ids: list[int], dispatcher: OutputDispatcher,
        send: Callable[[AddRequest], object], new_id: Callable[[], int], on_end: Callable[[], object],
    ) -> None:
        self._message, self._dispatcher = message, dispatcher
        self._send, self._new_id, self._on_end = send, new_id, on_end
        self._beams = Beams(message.params, len(message.prompt) // 4, stop_token_ids(message.params, eos_token_ids))
        self._measured: list[Logprobs | None] = []  # of the live beams, as they come in
        self._open: set[int] = set()  # ids of the requests in the engine
        self._num_cached = 0
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._error: str | None = None

    @property
    def request_id(self) -> int:
        return self._message.request_id

    def start(self) -> None:
        self._measure(first=True)

    def close(self) -> None:
        for request_id in self._open:
            self._dispatcher.close(request_id)
        self._open.clear()

    def output(self, tokenizer: Tokenizer) -> RequestOutput:
        """The n best beams, as text; may be called on any thread."""
        if self._error is not None:
            return self.failed(self._error)
        best = self._beams.best()
        return RequestOutput(
            self.request_id, [self._delta(i, beam, tokenizer) for i, beam in enumerate(best)],
            len(self._message.prompt) // 4, self._num_cached, sum(beam.length for beam in best), finished=True,
            prompt_logprobs=self._prompt_logprobs)

    def failed(self, error: str = PLAIN_ERROR) -> RequestOutput:
        return RequestOutput(self.request_id, [], len(self._message.prompt) // 4, self._num_cached, finished=True,
                             error=error)

    def _measure(self, first: bool = False) -> None:
        """Ask for the next token of every live beam."""
        live = self._beams.live
        self._measured = [None] * len(live)
        requests = [self._continuation(beam, first) for beam in live]
        self._open = {request.request_id for request in requests}
        for index, request in enumerate(requests):
            self._dispatcher.open_probe(request, partial(self._take, index, request.request_id))
        for request in requests:
            self._send(request)

    def _continuation(self, beam: Beam, first: bool) -> AddRequest:
        given = self._message.params
        params = SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=self._beams.num_logprobs,
            logprob_token_ids=given.logprob_token_ids, prompt_logprobs=given.prompt_logprobs if first else None)
        if first:
            return msgspec.structs.replace(self._message, params=params)
        # The deadline of a first token was the first step's.
        return msgspec.structs.replace(
            self._message, request_id=self._new_id(), params=params, ttft_slo_ms=0, continues=True,
            prompt=self._message.prompt + np.array(beam.token_ids(), np.int32).tobytes())

    def _take(self, index: int, request_id: int, result: ProbeResult) -> None:
        self._open.discard(request_id)
        if result.error is not None or result.logprobs is None:
            self._fail(result.error or PLAIN_ERROR)
            return
        self._measured[index] = result.logprobs
        if request_id == self.request_id:
            self._num_cached, self._prompt_logprobs = result.num_cached_tokens, result.prompt_logprobs
        if self._open:
            return
        try:
            self._advance()
        except Exception:  # it must not end the others' requests
            log.exception("Request %s: its beam search failed.", self._message.external_id)
            self._fail(PLAIN_ERROR)

    def _advance(self) -> None:
        self._beams.advance([m for m in self._measured if m is not None])
        if self._beams.done:
            self._on_end()
        else:
            self._measure()

    def _fail(self, error: str) -> None:
        self.close()
        self._error = error
        self._on_end()

    def _delta(self, index: int, beam: Beam, tokenizer: Tokenizer) -> SequenceDelta:
        params = self._message.params
        prompt = self._message.prompt_token_ids.tolist() if tokenizer.prompt_matters else []
        detokenizer = tokenizer.detokenizer(
            prompt, params.skip_special_tokens, params.spaces_between_special_tokens,
            params.shown_special_tokens) if params.detokenize else None
        sequence = SequenceOutput(index, index, params, tokenizer, detokenizer, late=True)
        for one in beam.path():
            sequence.add(one.token_id, one.measured, ends_here=one.stop_token_id >= 0)
        reason = FINISH_LENGTH if beam.stop_token_id < 0 else FINISH_STOP
        sequence.finish(Finished(index, reason, beam.stop_token_id))
        return sequence.take()
