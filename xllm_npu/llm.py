"""Offline use: `LLM(model).generate(prompts, SamplingParams(...))`, the server's engine in the caller's process.

Everything between text and engine is what the HTTP process uses too: the same tokenizer, chat template, request
factory and output dispatcher; only the loop is this module's, which steps the engine until the prompts of one call
are done. Calls from several threads take turns. Knows nothing of HTTP and of how the engine works.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.config.settings import Settings, spans_machines
from xllm_npu.master.beam_request import BeamRequest
from xllm_npu.master.local_adapters import LocalAdapters
from xllm_npu.master.output_dispatcher import OutputDispatcher
from xllm_npu.master.progress_bars import ProgressListener, generation_bar, startup_bar
from xllm_npu.master.request_factory import GenerationInput, RequestFactory
from xllm_npu.master.residency_error import (
    ResidencyError,
    check_can_sleep,
    check_can_update,
    check_level,
    check_tags,
)
from xllm_npu.state.beam_search_params import BeamSearchParams
from xllm_npu.state.lora_request import LoRARequest
from xllm_npu.state.messages import (
    PAUSED,
    SLEEPING,
    AbortRequest,
    AddRequest,
    CheckWeights,
    CommandDone,
    EngineCommand,
    EngineReady,
    Residency,
    ResidencyMessage,
    Resume,
    Sleep,
    StepOutputs,
    UpdateWeights,
    Wake,
)
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta, TokenLogprob
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams
from xllm_npu.text.chat_template import ChatTemplate
from xllm_npu.text.tokenizer import Tokenizer

# A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]
T = TypeVar("T")


class Engine(Protocol):
    """What this module needs of `master.engine_loop.EngineLoop`."""

    @property
    def ready(self) -> EngineReady: ...

    @property
    def tokenizer_dir(self) -> Path: ...

    def submit(self, message: AddRequest | AbortRequest) -> None: ...

    def step(self) -> StepOutputs | None: ...

    def has_work(self) -> bool: ...

    def change(self, message: ResidencyMessage) -> Residency: ...

    def command(self, message: EngineCommand) -> CommandDone: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class CompletionResult:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # stop | length | abort | error
    stop_reason: int | str | None  # the stop token id or stop string, if one of those ended it
    # For each token, if asked for: the tokens' log probabilities by id, the chosen one first.
    logprobs: list[dict[int, TokenLogprob]] | None = None
    cumulative_logprob: float | None = None  # of the chosen tokens; None if logprobs were not asked for


@dataclass(slots=True)
class RequestResult:
    """A prompt and its answers: `params.n` of them."""

    request_id: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionResult] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    error: str | None = None  # why the engine could not finish it


class LLM:
    """A model in this process.

    `model` is what `xllm-npu serve` takes (None: the default model), `settings` are its flags with underscores:
    `LLM("smollm2", max_model_len=2048, dtype="float32")`. Raises SettingsError, or what the engine says when it cannot
    start. Use it as a context manager or call `close` to give the device's memory back.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.settings = settings_from_kwargs(model=model, **settings)
        with startup_bar() as listener:
            self._engine = start_engine(self.settings, listener)
        self._closer = weakref.finalize(self, self._engine.close)
        try:
            self.info = self._engine.ready
            self.tokenizer = Tokenizer(self._engine.tokenizer_dir)
            self._template = ChatTemplate.of(self.tokenizer, self.settings.model.chat_template)
        except BaseException:
            self.close()
            raise
        self._factory = RequestFactory(self.tokenizer, self.info, self.settings.model.max_logprobs)
        self._dispatcher = OutputDispatcher(self.tokenizer, self._engine.submit)
        self._adapters = LocalAdapters(self.settings.lora, self._engine.command)
        self._lock = threading.Lock()
        self._asleep = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestResult]:
        """One result for each prompt, in their order; a single prompt gives a list of one.

        `sampling_params`: one for all, or one for each; None: the model's own defaults.
        `use_tqdm`: show a progress bar, if on a terminal.
        `lora_request`: the adapter, one for all or one for each; needs `enable_lora=True`.
        Raises InvalidParameter before anything runs if one of the prompts cannot be served.
        """
        tokenized = [self._tokenized(p, True) for p in _as_list(prompts)]
        return self._run(tokenized, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestResult]:
        """`generate` for one conversation, or for several, each rendered by the model's chat template."""
        several = not isinstance(next(iter(messages), None), dict)
        conversations: Iterable[Any] = messages if several else [messages]
        texts = [
            self._template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template=chat_template,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run([self._tokenized(t, False) for t in texts], sampling_params, use_tqdm, lora_request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True, *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestResult]:
        """The `beam_width` best answers to each prompt, best first, with their cumulative log probabilities."""
        return self.generate(prompts, params.sampling_params(), use_tqdm, lora_request=lora_request)

    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, as a server does for requests that say nothing."""
        return SamplingParams(**self.info.default_sampling)  # type: ignore[arg-type]

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back; cached prefixes are forgotten.

        `level` 1 keeps the weights in host memory, 2 drops them. Needs `enable_vmm_weights=True`; raises
        ResidencyError. Waits for prompts that run on other threads. Again while asleep: a deeper level counts.
        """
        check_level(level)
        check_can_sleep(self.settings.kv_cache.enable_vmm_weights)
        with self._lock:
            self._change(Sleep(level, "keep"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: all of it, or that of `tags` ("weights", "kv_cache"), the rest later.

        Raises ResidencyError where there is not enough; nothing has changed then.
        """
        check_tags(tags or ())
        with self._lock:
            answer = self._change(Wake(tags or []))
            if answer.state == PAUSED:  # all is there
                self._change(Resume())

    def update_weights(self, path: str) -> None:
        """Replace the weights by those of another checkpoint of the same network, a directory or hub id.

        Cached prefixes are forgotten. Raises ResidencyError; the old weights serve on then. Waits for prompts that run
        on other threads. Weights that `sleep(2)` has dropped come from there with the wake-up.
        """
        check_can_update(self.settings.model)
        with self._lock:
            self._change(CheckWeights(path))
            if self._change(UpdateWeights(path)).state == PAUSED:
                self._change(Resume())

    @property
    def is_sleeping(self) -> bool:
        return self._asleep

    def _change(self, message: ResidencyMessage) -> Residency:
        self._must_be_open()
        answer = self._engine.change(message)
        self._asleep = answer.state == SLEEPING
        if answer.error:
            if answer.state == PAUSED:
                self._engine.change(Resume())
            raise ResidencyError(answer.reason, answer.error)
        return answer

    def close(self) -> None:
        """Stop the engine; may be called again."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tokenized(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(t) for t in prompt["prompt_token_ids"]]
            if "prompt" not in prompt:
                raise InvalidParameter("prompt", "A prompt that is a dict needs 'prompt' or 'prompt_token_ids'.")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        return None, [int(t) for t in prompt]

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_bar: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestResult]:
        self._must_be_open()
        given = self.default_params() if sampling_params is None else sampling_params
        params = _one_for_each("sampling_params", given, len(prompts))
        adapters = _one_for_each("lora_request", lora_request, len(prompts))
        requests = [self._request(i, ids, p) for i, ((_, ids), p) in enumerate(zip(prompts, params))]
        results = [RequestResult(r.external_id, text, ids) for r, (text, ids) in zip(requests, prompts)]
        with self._lock, generation_bar(len(prompts), use_bar) as advance:
            if self._asleep:
                raise RuntimeError("This LLM is asleep. Call wake_up first.")
            for request, number in zip(requests, self._adapters.numbers(adapters)):
                request.lora_id = number
            closers: list[Callable[[], object]] = []
            try:
                for request, result in zip(requests, results):
                    self._submit(request, _collector(result, advance), closers)
                self._step_until_done()
            finally:  # after an error or Ctrl-C the engine forgets what is left
                for close in closers:
                    close()
        return results

    def _must_be_open(self) -> None:
        if not self._closer.alive:
            raise RuntimeError("This LLM is closed. Make a new one.")

    def _submit(
        self, request: AddRequest, sink: Callable[[RequestOutput], None], closers: list[Callable[[], object]]
    ) -> None:
        """Adds to `closers` what closes the request if it is unfinished."""
        if request.params.use_beam_search:
            search = BeamRequest(request, self.info.eos_token_ids, self._dispatcher, self._engine.submit,
                                 self._factory.new_id, lambda: sink(search.output(self.tokenizer)))
            closers.append(search.close)
            search.start()
            return
        closers.append(partial(self._dispatcher.close, request.request_id))
        self._dispatcher.open(request, sink, stream=False)
        self._engine.submit(request)

    def _request(self, index: int, ids: list[int], params: SamplingParams) -> AddRequest:
        try:
            request = self._factory.make(GenerationInput(prompt_token_ids=ids, params=params))
        except InvalidParameter as e:
            raise InvalidParameter(e.param, f"Prompt {index}: {e.message}") from None
        request.external_id = str(request.request_id)
        return request

    def _step_until_done(self) -> None:
        while self._dispatcher.open_requests:
            outputs = self._engine.step()
            if outputs is not None:
                self._dispatcher.handle(outputs)
            elif not self._engine.has_work():
                raise RuntimeError(f"The engine stopped with {self._dispatcher.open_requests} requests unfinished.")


def start_engine(settings: Settings, listener: ProgressListener | None) -> Engine:
    """The in-process engine; imported only here, as it brings torch along."""
    if settings.parallel.dp_size > 1:
        raise SettingsError(f"LLM runs one engine, in the caller's process: dp_size must be 1, got "
                            f"{settings.parallel.dp_size}. Serve the model to use several.")
    if spans_machines(settings):
        raise SettingsError("LLM runs one engine, on the caller's machine: leave nnodes and placement out. "
                            "Serve the model to use several machines.")
    if settings.lora.lora_modules:
        raise SettingsError("lora_modules are a server's: give LLM.generate a lora_request instead.")
    from xllm_npu.execution.process_setup import configure_process

    configure_process(settings, settings.parallel.tp_size)  # thread settings count only before torch is loaded
    from xllm_npu.master.engine_loop import EngineLoop

    return EngineLoop.create(settings, listener)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a text, a dict or a list of token ids."""
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_for_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"There are {count} prompts and {len(given)} {name}; give one, or one for each.")
    return list(given)


def _collector(result: RequestResult, advance: Callable[[int], None]) -> Callable[[RequestOutput], None]:
    """Fills `result` with the one output that a request has without streaming."""

    def collect(output: RequestOutput) -> None:
        result.outputs = [_completion(d) for d in output.deltas]
        result.num_cached_tokens = output.num_cached_tokens
        result.error = output.error
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = [None if p is None else _by_id(p) for p in output.prompt_logprobs]
        advance(output.num_generated_tokens)

    return collect


def _completion(delta: SequenceDelta) -> CompletionResult:
    result = CompletionResult(delta.index, delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason)
    if delta.logprobs is not None:
        result.logprobs = [_by_id(p) for p in delta.logprobs]
        result.cumulative_logprob = sum(p.chosen.logprob for p in delta.logprobs)
    return result


def _by_id(position: PositionLogprobs) -> dict[int, TokenLogprob]:
    return {t.token_id: t for t in [position.chosen, *position.top]}
