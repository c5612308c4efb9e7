"""A master without an engine: tokens are bytes, and each request's outputs are a script's.

A script is an async generator function from a GenerationInput to RequestOutputs. What was submitted and what was
closed before its end is recorded, so that tests can wait for it by events.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.config.kv_cache import KvCacheSettings
from xllm_npu.config.lora import LoraSettings
from xllm_npu.config.settings import Settings
from xllm_npu.master.adapters import Adapters
from xllm_npu.master.engine_group import CommandFailed
from xllm_npu.master.llm_master import EngineDeadError, EngineStatus, ModelSleeping
from xllm_npu.master.model_residency import ResidencyError, ResidencyState, ServedWeights
from xllm_npu.master.request_factory import GenerationInput
from xllm_npu.metrics import Metrics
from xllm_npu.state.messages import PAUSED, SLEEPING, TAGS, EngineCommand, EngineReady
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta, TokenLogprob
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.chat_prompt import ChatPrompt
from xllm_npu.text.grammar_compiler import GrammarsBusy
from xllm_npu.text.output_format import ModelHints, output_format

if TYPE_CHECKING:
    from xllm_npu.text.grammar_matcher import MatcherFactory

Script = Callable[[GenerationInput], AsyncIterator[RequestOutput]]

INFO = EngineReady(
    model_name="tiny", architecture="TinyForCausalLM", platform="cpu", device="test cpu", dtype="float32",
    vocab_size=256, max_model_len=512, eos_token_ids=[0], num_kv_blocks=64, block_size=16, max_seqs=64,
    max_tokens_per_batch=1024, weight_bytes=3 << 20, kv_cache_bytes=1 << 20, graph_sizes=[1, 2, 4], load_seconds=0.5)


class ByteTokenizer:
    marker_ids = {"<|im_start|>": 257, "<|im_end|>": 258}

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("latin-1")


def output(request: GenerationInput, *deltas: SequenceDelta, generated: int = 0, **fields: Any) -> RequestOutput:
    return RequestOutput(1, list(deltas), len(request.prompt_token_ids), num_generated_tokens=generated, **fields)


def token_logprob(token_id: int, logprob: float = -0.5, rank: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id, chr(token_id), logprob, rank, [token_id])


def position(token_id: int, offset: int = 0) -> PositionLogprobs:
    other = (token_id + 1) % 256
    return PositionLogprobs(token_logprob(token_id), [token_logprob(token_id), token_logprob(other, -1.5, 2)], offset)


def says(*pieces: str, finish: str = "stop", stop_reason: int | str | None = None, cached: int = 0) -> Script:
    """Every sequence says `pieces`, one an output; the finish comes with the last."""

    async def script(request: GenerationInput) -> AsyncIterator[RequestOutput]:
        n, generated, offset = request.params.n, 0, 0
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            deltas = []
            for index in range(n):
                ids = list(piece.encode())
                logprobs = None
                if request.params.logprobs is not None:
                    logprobs = [position(t, offset + k) for k, t in enumerate(ids)]
                deltas.append(SequenceDelta(index, piece, ids, logprobs, finish if last else None,
                                            stop_reason if last else None))
            generated += n * len(piece.encode())
            offset += len(piece)
            prompt_logprobs = None
            if i == 0 and request.params.prompt_logprobs is not None:
                prompt_logprobs = [None, *(position(t) for t in request.prompt_token_ids[1:])]
            yield output(request, *deltas, generated=generated, finished=last, num_cached_tokens=cached,
                         prompt_logprobs=prompt_logprobs)

    return script


def says_then_waits(piece: str, gate: asyncio.Event) -> Script:
    """One output, then nothing until `gate` is set, then the end."""

    async def script(request: GenerationInput) -> AsyncIterator[RequestOutput]:
        yield output(request, SequenceDelta(0, piece, list(piece.encode())), generated=len(piece))
        await gate.wait()
        yield output(request, SequenceDelta(0, "!", [33], None, "stop"), generated=len(piece) + 1, finished=True)

    return script


class FakeMemory:
    """What models share: so many of them may be awake; None: all."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.awake: set[FakeMaster] = set()

    def take(self, master: "FakeMaster") -> None:
        if self.room is not None and len(self.awake | {master}) > self.room:
            raise ResidencyError("memory", "There is not enough memory.")
        self.awake.add(master)


class FakeGrammars:
    """Compiles in this process, over the tokens of the tiny model."""

    def __init__(self) -> None:
        self.checked: list[tuple[str, str]] = []  # grammar, field
        self.busy = False

    async def check(self, grammar: str, param: str) -> None:
        if self.busy:
            raise GrammarsBusy("The server is compiling other grammars.")
        self.checked.append((grammar, param))
        try:
            await asyncio.to_thread(tiny_matchers().check, grammar)
        except ValueError as error:
            raise InvalidParameter(param, f"{param} cannot be used: {error}") from None


@functools.cache
def tiny_matchers() -> "MatcherFactory":
    from xllm_npu.text.grammar_matcher import MatcherFactory

    tokenizer = byte_tokenizer()
    return MatcherFactory(tokenizer.to_str(), tokenizer.get_vocab_size(), [tokenizer.token_to_id(EOS)])


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text matches."""
    from tests.support.tiny_tokenizer import byte_tokenizer

    matcher = tiny_matchers().matcher(grammar)
    return matcher.consume_tokens(byte_tokenizer().encode(text).ids) and matcher.is_accepting()


class FakeStream:
    def __init__(self, master: "FakeMaster", request: GenerationInput, outputs: AsyncIterator[RequestOutput]) -> None:
        self._master = master
        self._request = request
        self._outputs = outputs
        self._finished = False
        self._closed = False

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> RequestOutput:
        result = await self._outputs.__anext__()
        self._finished = result.finished
        return result

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._outputs.aclose()
            self._master.close(self._request, self._finished)


class FakeMaster:
    def __init__(self, script: Script | None = None, status: EngineStatus = EngineStatus.READY, *,
                 name: str = "tiny", memory: FakeMemory | None = None, vmm_weights: bool = True,
                 lora: LoraSettings | None = None) -> None:
        self.settings = Settings(kv_cache=KvCacheSettings(enable_vmm_kvcache=True, enable_vmm_weights=vmm_weights),
                                 lora=lora or LoraSettings())
        self.memory = memory or FakeMemory()
        self.memory.take(self)
        self.residency = ResidencyState()
        self.weights = ServedWeights("smollm2")
        self.refuse_weights: ResidencyError | None = None
        self.may_update = asyncio.Event()  # an update of the weights takes until then
        self.may_update.set()
        self.parent: FakeMaster | None = None
        self.abortions: list[list[str]] = []  # ids of requests that operators end
        self.transitions: list[tuple] = []
        self.may_wake = asyncio.Event()  # a wake-up takes until then
        self.may_wake.set()
        self.wakes = asyncio.Event()  # a wake-up has begun
        self.script = script or says("Hello", " world")
        self.status = status
        self.failure: str | None = None
        self.info: EngineReady | None = INFO if status is not EngineStatus.LOADING else None
        self.metrics = Metrics(name)
        self.tokenizer = ByteTokenizer()
        self.grammars = FakeGrammars()
        self.default_sampling: dict[str, float] = {}
        self.on_progress: Callable[[Any], None] | None = None
        self.requests: list[GenerationInput] = []
        self.streamed: list[bool] = []
        self.aborted: list[str] = []
        self.closed = 0
        self.messages: list[dict[str, Any]] = []
        self.template_kwargs: dict[str, Any] = {}
        self.add_special_tokens = False
        self.prompt_end = ""  # of the chat template: how it opens the assistant's turn
        self.output_format = output_format(None, None, ModelHints())
        self.submitted_one = asyncio.Event()
        self.aborted_one = asyncio.Event()
        self.healthy = True
        self.host_has_room = True  # for a copy of the weights
        self.stalled = self.lacked_memory = False
        self.num_waiting = 0
        self.commands: list[EngineCommand] = []
        self.adapters = Adapters(self.settings.lora, self.command)
        self.command_failure = ""

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if not self.settings.kv_cache.enable_vmm_weights:
            raise ResidencyError("unsupported", "This model cannot sleep.")
        if level not in (1, 2) or mode not in ("abort", "wait", "keep"):
            raise ResidencyError("invalid", f"level {level} or mode {mode} is unknown.")
        self.transitions.append(("sleep", level, mode))
        if level == 1 and not self.host_has_room:
            raise ResidencyError("memory", "The host has no room.")
        self.memory.awake.discard(self)
        self.status = EngineStatus.SLEEPING
        self.residency = ResidencyState(SLEEPING, level, (), last_seconds={"sleep": 0.5}, freed_bytes=7)

    async def wake(self, tags: Collection[str] = ()) -> None:
        self.transitions.append(("wake", *tags))
        if self.residency.state == SLEEPING:
            self.wakes.set()
            await self.may_wake.wait()
            self.memory.take(self)
        have = tuple(tag for tag in TAGS if not tags or tag in tags or tag in self.residency.tags)
        if have == TAGS:
            self.status, self.residency = EngineStatus.READY, ResidencyState()
        else:
            self.residency = replace(self.residency, tags=have)

    async def pause(self, mode: str = "abort") -> None:
        self.transitions.append(("pause", mode))
        self.residency = ResidencyState(PAUSED)

    async def resume(self) -> None:
        if self.residency.state == SLEEPING:
            raise ResidencyError("asleep", "The model sleeps: wake it up.")
        self.transitions.append(("resume",))
        self.residency = ResidencyState()

    async def update_weights(self, checkpoint: str, mode: str = "abort", label: str = "") -> int:
        self.transitions.append(("update", checkpoint, mode))
        await self.may_update.wait()
        if self.refuse_weights is not None:
            raise self.refuse_weights
        self.weights = ServedWeights(checkpoint, self.weights.version + 1, label)
        return self.weights.version

    def abort(self, external_ids: Collection[str] = ()) -> int:
        self.abortions.append(list(external_ids))
        return max(1, len(external_ids))

    async def command(self, message: EngineCommand) -> None:
        if self.status is EngineStatus.DEAD:
            raise EngineDeadError("The engine process has ended.")
        if self.command_failure:
            raise CommandFailed(self.command_failure)
        self.commands.append(message)

    def virtual_memory_info(self) -> dict[str, Any]:
        return {"pages": {"mapped": 3}}

    def generate(self, request: GenerationInput, stream: bool = True) -> AsyncIterator[RequestOutput]:
        if self.status is EngineStatus.DEAD:
            raise EngineDeadError("The engine process has ended.")
        if self.status is EngineStatus.SLEEPING:
            raise ModelSleeping("The model is asleep.")
        if len(request.prompt_token_ids) == 0:
            raise InvalidParameter(request.prompt_param, "The prompt is empty: it must have at least one token.")
        request.params.check(INFO.vocab_size)
        self.requests.append(request)
        self.streamed.append(stream)
        self.submitted_one.set()
        return FakeStream(self, request, self.script(request))

    def close(self, request: GenerationInput, finished: bool) -> None:
        self.closed += 1
        if not finished:
            self.aborted.append(request.external_id)
            self.aborted_one.set()

    @property
    def text(self) -> "FakeMaster":
        return self

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + list(text.encode())

    async def encode_chat(self, messages: list[dict[str, Any]], add_special_tokens: bool = False,
                          **template_kwargs: Any) -> ChatPrompt:
        self.messages, self.template_kwargs = messages, template_kwargs
        self.add_special_tokens = add_special_tokens
        text = "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages)
        return ChatPrompt(text + self.prompt_end, list((text + self.prompt_end).encode()))

    async def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("latin-1")

    def check_health(self) -> bool:
        return self.healthy

    async def start(self) -> None:
        pass

    async def end_held(self) -> None:
        pass

    async def shutdown(self, timeout: float) -> None:  # noqa: ASYNC109
        self.status = EngineStatus.DEAD

    def kill(self) -> None:
        pass
