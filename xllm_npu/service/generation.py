"""One API call's way through the master: inputs in, their outputs merged into one stream, everything closed after.

Used by chat (one input) and completions (up to 1,024). Knows neither API's reply format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from xllm_npu.master.adapters import AdapterGone
from xllm_npu.master.llm_master import EngineDeadError, ModelSleeping
from xllm_npu.master.request_factory import GIVES_VECTORS, GenerationInput, PoolingInput
from xllm_npu.service import request_id
from xllm_npu.service.admission import Admission
from xllm_npu.service.body import read_json
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.errors import ApiError, internal_error, model_not_found, residency_error, unavailable
from xllm_npu.service.protocol import GenerationBody, parse
from xllm_npu.service.replies import Usage, usage
from xllm_npu.service.watch import Watch
from xllm_npu.state.output import GRAMMAR_TOO_COMPLEX, RequestOutput
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.state.messages import EngineReady

G = TypeVar("G", bound=GenerationBody)

SUBMITTED_AT_ONCE = 64  # inputs of a call
MERGE_AHEAD = 16  # outputs of a call's inputs that may wait for a slow reader


async def generation_request(context: ApiContext, request: Request, kind: type[G], prefix: str,
                             ) -> tuple[G, str, Target]:
    """The request's body, checked but for its prompt and sampling; its id; the model that it is for."""
    body = parse(kind, await read_json(request))
    target = context.target(body.model)
    if target.info.pooling is not None:
        raise InvalidParameter("model", GIVES_VECTORS)
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "stream_options is allowed only when stream is true.")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameter("prompt_logprobs", "prompt_logprobs is not available when stream is true.")
    return body, prefix + (body.request_id or request.scope[request_id.SCOPE_KEY]), target


def generation_input(body: GenerationBody, external_id: str, prompt_token_ids: list[int], params: SamplingParams,
                     prompt_param: str) -> GenerationInput:
    return GenerationInput(
        external_id=external_id, prompt_token_ids=prompt_token_ids, params=params, prompt_param=prompt_param,
        priority=body.priority or 0, offline=bool(body.offline), ttft_slo_ms=body.ttft_slo_ms or 0,
        tpot_slo_ms=body.tpot_slo_ms or 0, ttlt_slo_ms=body.ttlt_slo_ms or 0, cache_salt=body.cache_salt or "",
        arrival_time=time.time(), truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left")


def truncated(token_ids: list[int], body: GenerationBody, max_tokens: int | None, info: EngineReady) -> list[int]:
    """The prompt that the engine will see, for replies that show it; the request factory checks the field."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, min(info.max_model_len, info.num_kv_blocks * info.block_size) - (max_tokens or 1))
    if keep == 0 or len(token_ids) <= keep:
        return token_ids
    return token_ids[:keep] if body.truncation_side == "right" else token_ids[-keep:]


class UsageCount:
    """Token counts over a call's inputs, kept current by their outputs."""

    def __init__(self, num_inputs: int) -> None:
        self._prompt = [0] * num_inputs
        self._cached = [0] * num_inputs
        self._generated = [0] * num_inputs

    def update(self, index: int, output: RequestOutput) -> None:
        self._prompt[index] = output.num_prompt_tokens
        self._cached[index] = output.num_cached_tokens
        self._generated[index] = output.num_generated_tokens

    def usage(self) -> Usage:
        return usage(sum(self._prompt), sum(self._generated), sum(self._cached))


class Outputs:
    """The outputs of `inputs` as (input's index, output), in order of arrival; must be closed."""

    def __init__(self, master: LLMMaster, inputs: Sequence[GenerationInput | PoolingInput], stream: bool
                 ) -> None:
        self._stream = stream
        self._iterators: list[AsyncIterator[RequestOutput]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._master = master
        self._inputs = inputs

    async def submit(self) -> None:
        """All or nothing: the first input that is refused takes back those before it."""
        try:
            for number, one in enumerate(self._inputs, 1):
                if number % SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # others have their turn
                self._iterators.append(self._submit_one(one))
        except BaseException:
            await self.aclose()
            raise

    def _submit_one(self, one: GenerationInput | PoolingInput) -> AsyncIterator[RequestOutput]:
        try:
            if isinstance(one, PoolingInput):
                return self._master.pool(one)
            return self._master.generate(one, self._stream)
        except EngineDeadError as exc:
            raise unavailable(str(exc), "engine_dead") from None
        except ModelSleeping as exc:
            raise residency_error(exc) from None

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        try:
            if len(self._iterators) == 1:
                async for output in self._iterators[0]:
                    yield 0, _checked(output)
            else:
                async for index, output in self._merged():
                    yield index, _checked(output)
        except EngineDeadError as exc:
            raise unavailable(str(exc), "engine_dead") from None

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(MERGE_AHEAD)

        async def pump(index: int, iterator: AsyncIterator[RequestOutput]) -> None:
            try:
                async for output in iterator:
                    await queue.put((index, output))
            except Exception as exc:
                await queue.put((index, exc))
            else:
                await queue.put((index, None))

        self._pumps = [asyncio.create_task(pump(i, it)) for i, it in enumerate(self._iterators)]
        running = len(self._pumps)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for iterator in self._iterators:
            close = getattr(iterator, "aclose", None)  # an AsyncIterator need not have it; the master's do
            if close is not None:
                await close()


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error == GRAMMAR_TOO_COMPLEX:
        raise ApiError(400, output.error, code="grammar_too_complex")
    if output.error is not None:
        raise internal_error(output.error)
    return output


async def submitted(context: ApiContext, request: Request, target: Target,
                    inputs: Sequence[GenerationInput | PoolingInput], stream: bool) -> Outputs:
    """The model's outputs, once it is awake."""
    await context.use(request, target)
    for one in inputs:
        if isinstance(one, GenerationInput):
            one.lora_id = target.lora_id
    outputs = Outputs(target.master, inputs, stream)
    try:
        await outputs.submit()
    except AdapterGone:
        raise model_not_found(target.name) from None
    return outputs


async def collect(request: Request, admission: Admission, outputs: Outputs,
                  take: Callable[[int, RequestOutput], object]) -> None:
    """Hand every output to `take`, unless the client leaves or the server gives up; closes `outputs`."""
    watch = Watch(request.receive)
    try:
        async with watch:
            with admission.watched(watch):
                async for index, output in outputs:
                    take(index, output)
    finally:
        await outputs.aclose()
