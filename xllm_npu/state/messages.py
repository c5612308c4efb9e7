"""What the HTTP process and the engine process say to each other: msgspec structs, arrays as raw bytes.

Client to engine: `AddRequest`, `AbortRequest`, `StepTogether`, `Shutdown`; `Pause`, `Resume`, `Sleep`, `Wake`,
`CheckWeights`, `UpdateWeights`, each of which is answered by one `Residency`; `ResetPrefixCache`, `Profile`, each of
which is answered by one `CommandDone`.
Engine to client: `EngineReady` once, then one `StepOutputs` for each engine step that has news for a client,
`EngineFailed` before it dies if it can.
A sequence is addressed by its key: request_id * SEQUENCES_PER_REQUEST + index.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from xllm_npu.state.kv_cache.page_allocator import PageStats
from xllm_npu.state.sampling_params import SamplingParams

SEQUENCES_PER_REQUEST = 256

# Finish reasons on the wire (repetition is found, and named, by the client alone); FINISH_NAMES gives the APIs' words.
FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR, FINISH_REPETITION = 1, 2, 3, 4, 5
FINISH_NAMES = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort", FINISH_ERROR: "error",
                FINISH_REPETITION: "repetition"}


class AddRequest(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """One request, validated. Sequences 0..params.num_sequences-1 are generated for it."""

    request_id: int  # unique in this server's life, below 2**54; made by the client
    external_id: str  # "chatcmpl-..." for logs
    prompt: bytes  # int32 token ids
    params: SamplingParams
    arrival_time: float  # time.time()
    priority: int = 0  # smaller runs earlier
    offline: bool = False
    ttft_slo_ms: int = 0  # 0: none
    tpot_slo_ms: int = 0
    ttlt_slo_ms: int = 0
    cache_salt: str = ""
    continues: bool = False  # another that runs already: a pause that lets open requests finish lets it pass
    lora_id: int = 0  # of an adapter that is loaded; 0: none

    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt, np.int32)


class AbortRequest(msgspec.Struct, tag=True, array_like=True):
    """Stop sequences: their text ended them (reason FINISH_STOP), or the client left (FINISH_ABORT).

    The engine answers nothing for them: the sender has already closed its side.
    """

    keys: list[int]
    reason: int


class StepTogether(msgspec.Struct, tag=True, array_like=True):
    """To every engine whenever one of them is sent a request, where engines step together; after that request."""

    total_sent: int  # requests sent to all engines together since they started


PauseMode = Literal["abort", "wait", "keep"]
WEIGHTS_TAG, KV_CACHE_TAG = "weights", "kv_cache"
TAGS = (WEIGHTS_TAG, KV_CACHE_TAG)  # what sleeps and wakes
AWAKE, PAUSED, SLEEPING = "awake", "paused", "sleeping"  # states of an engine


class Pause(msgspec.Struct, tag=True, array_like=True):
    """Run no more steps, but keep all memory. Requests that come from now on wait.

    Those that are open end now (abort), finish first (wait), or stay and go on when steps run again (keep).
    """

    mode: PauseMode


class Resume(msgspec.Struct, tag=True, array_like=True):
    """Run steps again. Refused while asleep. Where engines step together each counts it like a request."""


class Sleep(msgspec.Struct, tag=True, array_like=True):
    """Pause, if that has not happened, and give memory back. Cached prefixes are forgotten, and requests that stay lose
    their KV. Where engines step together, all of them are paused before one is told to sleep.
    """

    level: int  # 1: weights go to host memory; 2: they are dropped
    mode: PauseMode


class Wake(msgspec.Struct, tag=True, array_like=True):
    """Take memory again. With all of it the engine is paused, and not yet awake."""

    tags: list[str]  # of TAGS; empty: all


MAX_CHECKPOINT_CHARS = 4096
Checkpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHECKPOINT_CHARS)]  # a directory or hub id


class CheckWeights(msgspec.Struct, tag=True, array_like=True):
    """Whether this checkpoint could take the place of what is served, on all ranks. Steps run meanwhile."""

    checkpoint: Checkpoint


class UpdateWeights(msgspec.Struct, tag=True, array_like=True):
    """Pause, if that has not happened, and load this checkpoint, which was checked, over the weights. Cached prefixes
    are forgotten, and requests that stay are computed anew. An engine that answers with an error has the old weights.
    """

    checkpoint: Checkpoint


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End after the step in flight; the client has drained or aborted its requests."""


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True):
    """Forget what is cached. Requests that run keep what they have."""


class Profile(msgspec.Struct, tag=True, array_like=True):
    """Trace the steps from now on, into files in `directory`; without one: end the trace and write it."""

    directory: str


class LoadLora(msgspec.Struct, tag=True, array_like=True):
    """Read an adapter, on every rank or none, so that requests can name it."""

    lora_id: int  # 1 and up, never given again in this server's life: two loads of one name are two adapters
    path: str


class UnloadLora(msgspec.Struct, tag=True, array_like=True):
    """Forget an adapter, of which no request is open; harmless for one that is not there."""

    lora_id: int


class CommandDone(msgspec.Struct, tag=True, array_like=True):
    """The answer to an EngineCommand."""

    error: str = ""  # a sentence for people: why it did not come about


class Residency(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The answer to a ResidencyMessage: what holds now. After an error that is what held before."""

    state: str  # AWAKE, PAUSED, SLEEPING
    level: int  # of sleep; 0 unless SLEEPING
    tags: list[str]  # whose memory is there
    seconds: float  # from the message to this answer
    freed_bytes: int = 0  # given back by this transition
    error: str = ""  # a sentence for people: why it did not come about
    reason: str = ""  # with an error, one word: memory, asleep, unsupported, failed, checkpoint


class WeightLoad(msgspec.Struct, array_like=True):
    """How one rank got its weights."""

    rank: int  # among the engine's tensor-parallel ranks
    bytes: int  # in parameters, in their dtypes
    seconds: float
    peak_bytes: int  # of host memory, above what the process had before
    parameters: int = 0  # values in the checkpoint, those of all ranks


class OwnedPages(msgspec.Struct, array_like=True, kw_only=True):
    """Physical pages of one owner, on each rank of an engine."""

    owner: str  # of TAGS
    page_bytes: int
    mapped: int
    slots: int  # that it could have mapped
    together: int = 1  # that come and go at once
    pinned: int = 0  # of those mapped: they stay while the owner is awake
    ranks: int = 1

    @property
    def bytes(self) -> int:
        """On all ranks."""
        return self.mapped * self.page_bytes * self.ranks


class PoolingInfo(msgspec.Struct, array_like=True, kw_only=True):
    """What a model that gives vectors gives, and what is made of them by the client."""

    task: str  # embed | classify
    width: int  # values of a vector
    all_positions: bool  # a vector depends on all of its prompt's outputs, so that none is skipped by the prefix cache
    normalize: bool = False  # embeddings have length 1
    activation: str = "none"  # of labels: none | sigmoid | softmax
    labels: list[str] = msgspec.field(default_factory=list)
    matryoshka: bool = False  # the first values of an embedding are one too
    dimensions: list[int] = msgspec.field(default_factory=list)  # how many may be asked for; empty: any number
    pairs: str = ""  # how two texts become one prompt: "" (they do not) | tokens | qwen3_reranker
    num_types: int = 1  # of token embeddings: a prompt may have ids up to so many times the vocabulary's size


class EngineReady(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The engine can take requests. Figures are for the start-up screen and for validation."""

    model_name: str
    architecture: str
    platform: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_kv_blocks: int  # that requests can use
    block_size: int
    max_seqs: int
    max_tokens_per_batch: int
    weight_bytes: int
    kv_cache_bytes: int
    graph_sizes: list[int]
    load_seconds: float
    chunked_prefill: bool = True
    ranks: int = 1  # devices of this engine
    tokenizer_dir: str = ""
    default_sampling: dict[str, float] = msgspec.field(default_factory=dict)  # from generation_config.json
    implementation: str = "native"  # native | transformers: whose code the network is
    load_format: str = "auto"
    weight_loads: list[WeightLoad] = msgspec.field(default_factory=list)  # one a rank
    steps_together: bool = False  # every step of one data-parallel rank needs a step of all others
    engines: int = 1  # data-parallel ranks; the other figures are of one of them, but for bytes and devices
    elastic_kv_cache: bool = False  # kv_cache_bytes and num_kv_blocks are what memory could ever allow
    prefill_graph_sizes: list[int] = msgspec.field(default_factory=list)  # tokens
    rotary_switch: int = 0  # a sequence longer than this is computed anew with other rotary frequencies; 0: none is
    owned_pages: list[OwnedPages] = msgspec.field(default_factory=list)  # of virtual memory
    pooling: PoolingInfo | None = None  # prompts become vectors; None: text


class EngineProgress(msgspec.Struct, tag=True, array_like=True):
    """Start-up progress: a stage's name, done and total in the stage's own unit."""

    stage: str
    done: int
    total: int
    unit: str = ""


class EngineFailed(msgspec.Struct, tag=True, array_like=True):
    """The engine is about to exit. One sentence for people, and the traceback for the log."""

    message: str
    traceback: str = ""
    ours: bool = True  # an error of this package, whose message says what happened; else any exception
    lacked_memory: bool = False  # with more of the device's memory it might not have failed


class Logprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position: the chosen token first, then the top k, then those asked for by id."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]  # 1 is the most likely token


class Finished(msgspec.Struct, array_like=True):
    key: int
    reason: int  # FINISH_*
    stop_token_id: int = -1  # the stop or EOS token that ended it, else -1
    message: str = ""  # for FINISH_ERROR


class PromptInfo(msgspec.Struct, array_like=True):
    """Sent once for each request, with or before its first token."""

    request_id: int
    num_cached_tokens: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_logprobs: list[Logprobs | None] | None = None  # [num_prompt_tokens]; the first is None


class EngineStats(msgspec.Struct, array_like=True, kw_only=True):
    """Counters since start (num_*_total) and gauges of this moment."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0 to 1, blocks referenced by sequences
    free_blocks: int = 0  # that requests can have, cached ones included
    preemptions_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up
    prefix_hits_total: int = 0  # prompt tokens found
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    last_step_tokens: int = 0
    last_step_seconds: float = 0.0
    graph_misses_total: int = 0  # decode batches above the largest captured size
    pages: PageStats | None = None  # of an elastic KV cache
    prefill_graph_misses_total: int = 0  # steps with prompts above the largest captured size
    owned_pages: list[OwnedPages] = msgspec.field(default_factory=list)  # of virtual memory
    stalled: bool = False  # requests are open and none can go on: others have the memory that their KV blocks need
    running_loras: list[int] = msgspec.field(default_factory=list)  # adapters of requests that run
    waiting_loras: list[int] = msgspec.field(default_factory=list)  # and of those that wait


class StepOutputs(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Everything clients must hear about one engine step."""

    keys: bytes = b""  # int64 [n]: sequences with a new token
    tokens: bytes = b""  # int32 [n]
    vectors: dict[int, bytes] = msgspec.field(default_factory=dict)  # key of a sequence that ends here -> float32
    logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)  # sequence key -> its new token's
    finished: list[Finished] = msgspec.field(default_factory=list)  # after their tokens in `keys`
    prompts: list[PromptInfo] = msgspec.field(default_factory=list)
    stats: EngineStats | None = None

    def key_array(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.keys, np.int64)

    def token_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.tokens, np.int32)


ResidencyMessage = Pause | Resume | Sleep | Wake | CheckWeights | UpdateWeights
EngineCommand = ResetPrefixCache | Profile | LoadLora | UnloadLora
ClientMessage = (AddRequest | AbortRequest | StepTogether | Shutdown | Pause | Resume | Sleep | Wake | CheckWeights
                 | UpdateWeights | ResetPrefixCache | Profile | LoadLora | UnloadLora)
EngineMessage = EngineReady | EngineProgress | StepOutputs | EngineFailed | Residency | CommandDone


def sequence_key(request_id: int, index: int) -> int:
    return request_id * SEQUENCES_PER_REQUEST + index
