"""From settings to a worker that is ready to run: device, weights, KV cache, graphs, warm-up.

Reports each long stage through a callback. Everything that can be refused is refused here, before the first request,
with a message that says which setting to change.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xllm_models import hub
from xllm_models.attention.base import PagedBackend
from xllm_models.backends import attention_for, falls_back
from xllm_models.config import ModelConfig
from xllm_models.layers.sharding import check_expert_sharding, check_sharding
from xllm_models.registry import build_model
from xllm_platform.base import Platform, PlatformError
from xllm_platform.collectives import all_reduce
from xllm_platform.parallel import ParallelState
from xllm_platform.registry import select

from xllm_npu.config.settings import Settings
from xllm_npu.execution.executor import EagerRunner, Executor
from xllm_npu.execution.expert_balancer import ExpertBalancer
from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.model_loader import LoadError, load_model_weights, read_config
from xllm_npu.execution.rank import Rank, is_coupled
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.execution.step_message import StepInput
from xllm_npu.execution.worker import Worker, WorkerParts
from xllm_npu.memory.kv_capacity import CacheRequest, CacheTooSmall, longest_sequence, num_kv_blocks
from xllm_npu.state.batch import RowAdmission
from xllm_npu.state.messages import EngineProgress, EngineReady
from xllm_npu.state.sampling_params import SamplingParams

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 256
KERNELS_STAGE = "Loading kernels (the first start on a machine compiles them)"

Progress = Callable[[EngineProgress], None]


@dataclass(slots=True)
class LoadedWorker:
    worker: Worker
    ready: EngineReady  # num_kv_blocks does not count the dummy
    tokenizer_dir: Path


@dataclass(slots=True, frozen=True)
class _Shape:
    """Sizes that follow from settings, model and device together."""

    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_size: int


@dataclass(slots=True, frozen=True)
class _Start:
    """What is known before anything is loaded."""

    settings: Settings
    rank: Rank
    platform: Platform
    resolved: hub.ResolvedModel
    config: ModelConfig
    dtype: torch.dtype
    parallel: ParallelState
    began: float  # time.monotonic()


def load_worker(settings: Settings, rank: Rank, progress: Progress) -> LoadedWorker:
    """Everything from an idle process to a warm worker; all ranks of a world call it together.

    Raises LoadError, PlatformError, HubError, WeightError, ...
    """
    began = time.monotonic()
    platform = _select_platform(settings, rank)
    resolved = _resolve(settings, progress)
    config = read_config(settings, resolved.path)
    dtype = _dtype(settings, config, platform)
    check_sharding(config, settings.parallel.tp_size)
    parallel = _join(settings, rank, config, platform)
    try:
        return _load(_Start(settings, rank, platform, resolved, config, dtype, parallel, began), progress)
    except BaseException:
        parallel.shutdown()
        raise


def _load(start: _Start, progress: Progress) -> LoadedWorker:
    settings, platform, config, parallel = start.settings, start.platform, start.config, start.parallel
    dtype, resolved, rank = start.dtype, start.resolved, start.rank
    device, capabilities = platform.device(), platform.capabilities
    progress(EngineProgress(KERNELS_STAGE, 0, 1))
    model = build_model(config, dtype=dtype, device=device, kernels=capabilities.kernels, parallel=parallel)
    backend = _attention_backend(settings, platform, config, model.attention_needs)
    progress(EngineProgress(KERNELS_STAGE, 1, 1))

    def on_weights(done: int, total: int) -> None:
        progress(EngineProgress("Loading weights", done, total, "bytes"))

    weights = load_model_weights(settings, model, resolved.path, rank.tp_rank, on_weights)
    balancer = None
    if parallel.experts.balanced:
        p = settings.parallel
        balancer = ExpertBalancer(model, parallel, p.eplb_update_interval, p.eplb_update_threshold)
    shape = _shape(settings, config, platform)
    spec = model.attention_spec(shape.block_size)
    blocks, shape = _capacity(settings, rank, platform, backend, spec, config, shape)
    blocks, shape = _agree(parallel, platform, blocks, shape)
    attention = backend(spec)
    attention.allocate_kv_caches(blocks)
    model.bind_attention(attention)
    model.reserve_positions(shape.max_model_len)
    sizes = _graph_sizes(settings, platform, backend, shape)
    builder = InputBuilder(
        max_tokens=max(shape.max_tokens, *sizes, 1), max_rows=max(shape.max_seqs, *sizes, 1),
        max_blocks=-(-shape.max_model_len // shape.block_size), block_size=shape.block_size, device=device,
        pinned=capabilities.pinned_memory, two_rotations=model.rotary_switch > 0,
    )
    sampling = SamplingState(shape.max_seqs, config.vocab_size, device, rank.seed)
    graph = _capture(platform, model, attention, sizes, builder, progress, parallel.dp.size)
    executor = Executor(EagerRunner(model, attention), graph)
    worker = Worker(WorkerParts(platform, model, attention, builder, executor, sampling, parallel, balancer))
    _warm_up(worker, attention, shape, progress)
    if balancer is not None:
        balancer.restart()
    ready = EngineReady(
        model_name=model_name(settings, resolved.path), architecture=config.architecture, platform=platform.name,
        device=platform.device_name(), dtype=str(dtype).removeprefix("torch."), vocab_size=config.vocab_size,
        max_model_len=shape.max_model_len, eos_token_ids=list(config.eos_token_ids), num_kv_blocks=blocks - 1,
        block_size=shape.block_size, max_seqs=shape.max_seqs, max_tokens_per_batch=shape.max_tokens,
        weight_bytes=weights.bytes, kv_cache_bytes=blocks * backend.kv_bytes_per_block(spec), graph_sizes=sizes,
        load_seconds=time.monotonic() - start.began, chunked_prefill=settings.scheduler.enable_chunked_prefill,
        tokenizer_dir=str(resolved.tokenizer_dir), default_sampling=_default_sampling(config),
        implementation=config.implementation, load_format=settings.model.load_format, weight_loads=[weights],
        steps_together=is_coupled(settings, config), rotary_switch=model.rotary_switch,
    )
    return LoadedWorker(worker, ready, resolved.tokenizer_dir)


def model_name(settings: Settings, path: Path) -> str:
    """The name in the API: as set, else the hub id, else the directory's name."""
    if settings.model.model_id:
        return settings.model.model_id
    given = settings.model.model
    return path.name if Path(given).expanduser().exists() or "/" not in given else given


def _default_sampling(config: ModelConfig) -> dict[str, float]:
    given = dataclasses.asdict(config.generation)
    return {name: value for name, value in given.items() if value is not None}


def _select_platform(settings: Settings, rank: Rank) -> Platform:
    platform = select(settings.execution.platform)
    shared = platform.capabilities.shared_memory
    platform.set_device(0 if shared else max(rank.slot.device, settings.execution.device_id, 0))
    platform.configure_process(settings.execution.num_threads or None, rank.ranks_here)
    return platform


def _join(settings: Settings, rank: Rank, config: ModelConfig, platform: Platform) -> ParallelState:
    """Meet the other ranks. Their devices are selected, nothing is loaded yet."""
    init, backend = rank.parallel_init(settings, config), settings.parallel.communication_backend
    check_expert_sharding(config, init.world_size, init.ep_size, init.experts)
    return ParallelState.initialize(init, platform.collective_backend if backend == "auto" else backend)


def _agree(parallel: ParallelState, platform: Platform, blocks: int, shape: _Shape) -> tuple[int, _Shape]:
    """The smallest KV cache and the shortest context of all ranks: one scheduler plans for them together."""
    if parallel.world.size == 1:
        return blocks, shape
    found = torch.tensor([blocks, shape.max_model_len], dtype=torch.int64, device=platform.device())
    blocks, length = all_reduce(found, parallel.world, "min").tolist()
    return blocks, dataclasses.replace(shape, max_model_len=length)


def _resolve(settings: Settings, progress: Progress) -> hub.ResolvedModel:
    m = settings.model

    def on_pull(stage: str, done: int, total: int) -> None:
        """Stages are named like "download bytes", unit last."""
        name, _, unit = stage.rpartition(" ")
        progress(EngineProgress(f"Getting the model: {name}", done, total, "bytes" if unit == "bytes" else ""))

    return hub.resolve_model(m.model, use_modelscope=m.use_modelscope, revision=m.revision, cache_dir=m.download_dir,
                             weights=m.load_format != "dummy", progress=on_pull)


def _dtype(settings: Settings, config: ModelConfig, platform: Platform) -> torch.dtype:
    name = config.torch_dtype if settings.model.dtype == "auto" else settings.model.dtype
    offered = platform.capabilities.dtypes
    if name not in offered:
        known = ", ".join(offered)
        raise LoadError(f"Platform {platform.name} does not compute in {name}: set --dtype to one of {known}.")
    return getattr(torch, name)


def _shape(settings: Settings, config: ModelConfig, platform: Platform) -> _Shape:
    s, asked, longest = settings.scheduler, settings.model.max_model_len, config.max_context_length
    if asked is not None and asked > longest:
        raise LoadError(f"max_model_len is {asked} and the model's positions end at {longest}: lower max_model_len.")
    length = asked or longest
    max_tokens = s.max_tokens_per_batch
    if s.enable_chunked_prefill and "max_tokens_per_batch" not in s.model_fields_set:
        max_tokens = platform.capabilities.default_tokens_per_batch or max_tokens
    if not s.enable_chunked_prefill and max_tokens < length:
        if asked is not None:
            raise LoadError(f"Without chunked prefill a prompt must fit into one step: raise max_tokens_per_batch "
                            f"({max_tokens}) to max_model_len ({length}), or lower max_model_len.")
        length = max_tokens
    return _Shape(length, min(s.max_seqs_per_batch, max_tokens), max_tokens, settings.kv_cache.block_size)


def _attention_backend(
    settings: Settings, platform: Platform, config: ModelConfig, needs: frozenset[str]
) -> type[PagedBackend]:
    """The one asked for, or the platform's first that has what the model's attention `needs`."""
    name, offered = settings.execution.attention_backend, platform.capabilities.attention_backends
    if name != "auto" and name not in offered:
        raise LoadError(f"Platform {platform.name} has no attention backend {name}: "
                        f"set --attention_backend to one of {', '.join(offered)}.")
    backends = {one: attention_for(config, one) for one in offered}
    able = [one for one in offered if needs <= backends[one].features]
    lacking = " and ".join(sorted(needs))
    if not able:
        raise LoadError(f"The model's attention has {lacking}, and no attention backend of platform {platform.name} "
                        f"({', '.join(offered)}) has it: serve it on another platform.")
    if name == "auto":
        name = next((one for one in able if not falls_back(config, one)), able[0])
    if name not in able:
        raise LoadError(f"The model's attention has {lacking}, and attention backend {name} has not: "
                        f"set --attention_backend to auto or to one of {', '.join(able)}.")
    if falls_back(config, name):
        log.warning("attention backend %s has no latent attention: plain torch attends instead, more slowly", name)
    return backends[name]


def _capacity(
    settings: Settings, rank: Rank, platform: Platform, backend: type[PagedBackend], spec: Any,
    config: ModelConfig, shape: _Shape,
) -> tuple[int, _Shape]:
    """Blocks (the dummy included); the shape, with a max_model_len nobody asked for cut to what the cache holds."""
    kv, memory = settings.kv_cache, platform.memory_info()
    explicit = "max_memory_utilization" in kv.model_fields_set
    sharers = rank.ranks_here if platform.capabilities.shared_memory else 1
    blocks = num_kv_blocks(CacheRequest(
        bytes_per_block=backend.kv_bytes_per_block(spec), block_size=shape.block_size,
        max_model_len=shape.max_model_len, max_seqs=shape.max_seqs, free_bytes=memory.free // sharers,
        total_bytes=memory.total // sharers,
        workspace_bytes=_workspace_bytes(config, shape, settings.parallel.dp_size),
        utilization=kv.max_memory_utilization,
        max_cache_bytes=kv.max_cache_size,
        soft_limit_bytes=0 if explicit else platform.capabilities.default_cache_bytes,
    ))
    longest = longest_sequence(blocks, shape.block_size)
    if longest >= shape.max_model_len:
        return blocks, shape
    if settings.model.max_model_len is not None:
        raise CacheTooSmall(f"The KV cache holds {longest} tokens and max_model_len is {shape.max_model_len}: lower "
                            f"max_model_len, or raise max_cache_size or max_memory_utilization.")
    log.warning("max_model_len is lowered from %d to %d, what the KV cache holds", shape.max_model_len, longest)
    return blocks, _Shape(longest, shape.max_seqs, shape.max_tokens, shape.block_size)


def _workspace_bytes(config: ModelConfig, shape: _Shape, dp_size: int) -> int:
    """A generous bound on what the largest step needs beside weights and cache: activations, logits, sampling."""
    widest = config.hidden_size * 6 + config.intermediate_size * 3 + config.attention_width
    experts = 0
    if config.moe is not None:  # rows of all data-parallel ranks may come here, each for all of its experts
        experts = dp_size * (config.hidden_size * 3 + config.moe.top_k * config.moe.intermediate_size * 3)
    return shape.max_tokens * (widest + experts) * 4 + shape.max_seqs * config.vocab_size * 4 * 3


def _graph_sizes(
    settings: Settings, platform: Platform, backend: type[PagedBackend], shape: _Shape
) -> list[int]:
    if not settings.execution.enable_graph:
        return []
    capabilities = platform.capabilities
    if capabilities.graph == "none":
        raise PlatformError(f"Platform {platform.name} has no graph mode: turn enable_graph off.")
    if capabilities.graph == "capture" and not backend.capture_safe:
        raise LoadError(f"The attention backend {backend.__name__} reads lengths on the host and cannot be captured "
                        "in a graph: turn enable_graph off.")
    if capabilities.graph == "capture" and settings.parallel.expert_parallel_degree == 2:
        raise LoadError("With expert_parallel_degree=2 devices tell each other in each layer how many tokens come, "
                        "which no graph can hold: turn enable_graph off, or set expert_parallel_degree to 1.")
    wanted = settings.execution.graph_batch_sizes or capabilities.default_graph_sizes
    limit = min(shape.max_seqs, settings.execution.max_tokens_for_graph_mode)
    return sorted({min(size, limit) for size in wanted})


def _capture(
    platform: Platform, model: torch.nn.Module, attention: PagedBackend, sizes: list[int], builder: InputBuilder,
    progress: Progress, dp_size: int,
) -> GraphRunner | None:
    if not sizes:
        return None
    runner = GraphRunner(platform, model, attention)
    with torch.inference_mode(), platform.inference_context():
        runner.capture(sizes, builder, lambda done, total: progress(EngineProgress("Capturing graphs", done, total)),
                       dp_size)
    return runner


def _warm_up(worker: Worker, attention: PagedBackend, shape: _Shape, progress: Progress) -> None:
    """Run a prompt and a decode on the dummy block, so that no request pays for first-time compilation."""
    progress(EngineProgress("Warming up", 0, 1))
    attention.warmup()
    length = max(1, min(shape.max_tokens, shape.max_model_len - 2, WARM_UP_TOKENS))
    width = length // shape.block_size + 1
    dp_size = worker.parts.parallel.dp.size
    for admit, start, count in ((True, 0, length), (False, length, 1)):
        step = _warm_up_step(admit, start, count, width)
        if dp_size > 1:
            step.dp_tokens, step.dp_all_decode = [count] * dp_size, count == 1
        worker.execute(step)
    progress(EngineProgress("Warming up", 1, 1))


def _warm_up_step(admit: bool, start: int, count: int, width: int) -> StepInput:
    """`count` tokens of one row whose blocks are all the dummy."""

    def i32(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    params = SamplingParams(temperature=0.0, ignore_eos=True)
    admitted = [RowAdmission(row=0, sequence_index=0, params=params, stop_ids=[])] if admit else []
    return StepInput(
        step_id=-1, num_decodes=int(count == 1), rows=i32(0), start=i32(start), num_new=i32(count),
        tokens=i32(*[0] * count), block_table=i32(*[0] * width), table_width=width, sample_source=i32(0),
        sample_rows=i32(0), sample_output=i32(0), admitted=admitted, released=[] if admit else [0],
    )
