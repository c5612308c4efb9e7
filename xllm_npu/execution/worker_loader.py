"""From settings to a worker that is ready to run: device, weights, KV cache, graphs, warm-up.

Reports each long stage through a callback. Everything that can be refused is refused here, before the first request,
with a message that says which setting to change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from xllm_models import hub
from xllm_models.attention.base import PagedBackend
from xllm_models.backends import get_ops
from xllm_models.config import ModelConfig
from xllm_models.layers.sharding import check_expert_sharding, check_sharding
from xllm_models.pooler import Pooler
from xllm_models.registry import build_model
from xllm_platform.base import Platform
from xllm_platform.collectives import all_reduce
from xllm_platform.parallel import ParallelState
from xllm_platform.registry import select

from xllm_npu.config.settings import Settings
from xllm_npu.execution.captured_graphs import CapturedGraphs
from xllm_npu.execution.constrained_decoding import ConstrainedDecoding
from xllm_npu.execution.executor import EagerRunner, Executor
from xllm_npu.execution.expert_balancer import ExpertBalancer
from xllm_npu.execution.grammar_cache import Compiler, GrammarCache
from xllm_npu.execution.graph_plan import GraphSizes, measure
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.load_plan import (
    CachePlan,
    StepShape,
    choose_attention,
    choose_dtype,
    graph_sizes,
    num_sharers,
    plan_cache,
    prefill_graph_sizes,
    step_shape,
    workspace_bytes,
)
from xllm_npu.execution.lora_worker import LoraWorker
from xllm_npu.execution.model_loader import load_model_weights, read_config
from xllm_npu.execution.pooled_rows import PooledRows
from xllm_npu.execution.rank import Rank, is_coupled
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.execution.virtual_weights import build_over_pages, make_sleepy
from xllm_npu.execution.warm_up import warm_up
from xllm_npu.execution.weight_update import CheckpointLoader, WeightUpdater, resolve_checkpoint
from xllm_npu.execution.worker import Worker, WorkerParts
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.messages import EngineProgress, EngineReady, PoolingInfo, WeightLoad

KERNELS_STAGE = "Loading kernels (the first start on a machine compiles them)"

Progress = Callable[[EngineProgress], None]
# What compiles grammars over a model's tokens: from its tokenizer's directory, the logits' width and the EOS tokens.
LoadCompiler = Callable[[Path, int, Sequence[int]], Compiler]


@dataclass(slots=True)
class LoadedWorker:
    worker: Worker
    ready: EngineReady  # num_kv_blocks does not count the dummy
    tokenizer_dir: Path
    memory: WorkerMemoryResources | None = None  # where weights or KV cache are in virtual memory

    @property
    def grammars(self) -> GrammarCache | None:
        constrained = self.worker.parts.constrained
        return None if constrained is None else constrained.grammars


@dataclass(slots=True, frozen=True)
class _Start:
    """What is known before anything is loaded."""

    settings: Settings
    rank: Rank
    platform: Platform
    resolved: hub.ResolvedModel
    weights: Path  # a checkpoint of that model or of another one like it
    config: ModelConfig
    dtype: torch.dtype
    parallel: ParallelState
    began: float  # time.monotonic()
    grammars: LoadCompiler | None


def load_worker(
    settings: Settings, rank: Rank, progress: Progress, grammars: LoadCompiler | None = None
) -> LoadedWorker:
    """Everything from an idle process to a warm worker; all ranks of a world call it together.

    `grammars`, for the rank that samples: called with the first request that has one.
    Raises LoadError, PlatformError, HubError, WeightError, ...
    """
    began = time.monotonic()
    platform = _select_platform(settings, rank)
    resolved = _resolve(settings, progress)
    weights = resolve_checkpoint(settings.model, rank.checkpoint) if rank.checkpoint else resolved.path
    config = read_config(settings, resolved.path)
    dtype = choose_dtype(settings, config, platform)
    _check_cut(settings, rank, config)
    parallel = _join(settings, rank, config, platform)
    try:
        return _load(_Start(settings, rank, platform, resolved, weights, config, dtype, parallel, began, grammars),
                     progress)
    except BaseException:
        parallel.shutdown()
        raise


def check_cut(settings: Settings, rank: Rank, progress: Progress) -> None:
    """Get the model and raise ShardingError if its ranks cannot share it: before a process is started for each."""
    _check_cut(settings, rank, read_config(settings, _resolve(settings, progress).path))


def _check_cut(settings: Settings, rank: Rank, config: ModelConfig) -> None:
    check_sharding(config, settings.parallel.tp_size)
    init = rank.parallel_init(settings, config)
    check_expert_sharding(config, init.world_size, init.ep_size, init.experts)


def _load(start: _Start, progress: Progress) -> LoadedWorker:
    """Model, KV cache, graphs, warm-up."""
    progress(EngineProgress(KERNELS_STAGE, 0, 1))
    model, memory = _build(start)
    try:
        return _fill(start, model, memory, progress)
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def _fill(start: _Start, model: Any, weight_memory: WorkerMemoryResources | None, progress: Progress) -> LoadedWorker:
    settings, platform, config, parallel = start.settings, start.platform, start.config, start.parallel
    backend = choose_attention(settings, platform, config, model.attention_needs, start.dtype)
    progress(EngineProgress(KERNELS_STAGE, 1, 1))
    weights = _weights(start, model, weight_memory, progress)
    loader = CheckpointLoader(settings, model, start.weights, start.rank.tp_rank)
    if weight_memory is not None:
        make_sleepy(weight_memory, platform, loader, start.rank)
    balancer = _balancer(start, model)  # before the cache is sized: it sets memory aside
    lora = _lora(start, model)  # likewise
    pooler = _pooler(start)
    shape = step_shape(settings, config, platform)
    spec = model.attention_spec(shape.block_size)
    sizes = GraphSizes(graph_sizes(settings, platform, backend, shape), prefill_graph_sizes(settings, platform, shape))
    sizes, graph_bytes = _plan_graphs(start, model, backend, spec, shape, sizes, progress)
    planned = plan_cache(settings, start.rank, platform, backend, spec, config, shape, graph_bytes, weight_memory)
    plan = _agree(parallel, platform, planned)
    shape = plan.shape
    attention = backend(spec)
    memory = weight_memory if plan.virtual is None else plan.virtual.resources()
    attention.allocate_kv_caches(plan.blocks, memory.kv.new_cache if memory is not None and memory.has_kv else None)
    model.bind_attention(attention)
    model.reserve_positions(shape.max_model_len)
    worker = _assemble(start, model, attention, balancer, shape, sizes, progress)
    if pooler is not None:
        worker.parts.pooled = PooledRows(pooler, shape.max_seqs, config.hidden_size, platform.device())
    worker.parts.memory, worker.parts.lora = memory, lora
    worker.parts.updater = updater = WeightUpdater(settings, config, model, loader, platform.synchronize,
                                                   start.rank.checkpoint or settings.model.model)
    updater.pooler, updater.balancer, updater.memory = pooler, balancer, memory
    progress(EngineProgress("Warming up", 0, 1))
    warm_up(worker, attention, shape)
    if balancer is not None:
        balancer.restart()
    progress(EngineProgress("Warming up", 1, 1))
    cache = plan.blocks, plan.blocks * backend.kv_bytes_per_block(spec)
    ready = _describe(start, model, shape, weights, cache, sizes)
    if pooler is not None:
        _describe_pooling(ready, config, pooler)
    if memory is not None and memory.elastic and memory.has_kv:
        ready.elastic_kv_cache, ready.num_kv_blocks = True, memory.layout.num_whole_blocks - 1
    return LoadedWorker(worker, ready, start.resolved.tokenizer_dir, memory)


def _build(start: _Start) -> tuple[Any, WorkerMemoryResources | None]:
    """A model without its weights, and the virtual memory that these lie in if they do."""
    settings, platform, config = start.settings, start.platform, start.config

    def build() -> Any:
        return build_model(config, dtype=start.dtype, device=platform.device(), kernels=platform.capabilities.kernels,
                           parallel=start.parallel)

    def block_bytes(model: Any) -> int:
        backend = choose_attention(settings, platform, config, model.attention_needs, start.dtype)
        spec = model.attention_spec(settings.kv_cache.block_size)
        return backend.kv_bytes_per_block(spec) // backend.num_kv_caches(spec)

    if not settings.kv_cache.enable_vmm_weights:
        return build(), None
    shape = step_shape(settings, config, platform)
    return build_over_pages(settings, platform, build, block_bytes, sharers=num_sharers(start.rank, platform),
                            workspace_bytes=workspace_bytes(config, shape, settings.parallel.dp_size),
                            rank=start.rank)


def _weights(start: _Start, model: Any, memory: WorkerMemoryResources | None, progress: Progress) -> WeightLoad:
    """Load them, unless they are another model's, and there."""
    if memory is not None and memory.importer is not None:
        return WeightLoad(start.rank.tp_rank, sum(p.nbytes for p in model.parameters()), 0.0, 0)
    return load_model_weights(
        start.settings, model, start.weights, start.rank.tp_rank,
        lambda done, total: progress(EngineProgress("Loading weights", done, total, "bytes")))


def _balancer(start: _Start, model: Any) -> ExpertBalancer | None:
    if not start.parallel.experts.balanced:
        return None
    p = start.settings.parallel
    return ExpertBalancer(model, start.parallel, p.eplb_update_interval, p.eplb_update_threshold)


def _lora(start: _Start, model: Any) -> LoraWorker | None:
    lora = start.settings.lora
    return LoraWorker(model, lora.max_loras, lora.max_lora_rank, start.parallel.tp) if lora.enable_lora else None


def _assemble(
    start: _Start, model: Any, attention: PagedBackend, balancer: ExpertBalancer | None, shape: StepShape,
    sizes: GraphSizes, progress: Progress,
) -> Worker:
    """What runs steps, around a model whose weights and cache are in place."""
    platform, parallel = start.platform, start.parallel
    builder = _builder(platform, model, attention, shape, sizes)
    sampling = SamplingState(shape.max_seqs, start.config.vocab_size, platform.device(), start.rank.seed)
    graphs = None
    if sizes.decode:
        graphs = CapturedGraphs(platform, model, attention, builder, parallel.dp.size, max(sizes.prefill, default=0))
        graphs.capture(sizes, lambda done, total: progress(EngineProgress("Capturing graphs", done, total)))
    runners = (graphs.decode, graphs.prefill) if graphs is not None else (None, None)
    executor = Executor(EagerRunner(model, attention), *runners)
    return Worker(WorkerParts(platform, model, attention, builder, executor, sampling, parallel, balancer,
                              _constrained(start, shape)))


def _constrained(start: _Start, shape: StepShape) -> ConstrainedDecoding | None:
    if start.grammars is None or start.config.pooling is not None:
        return None
    directory = Path(start.settings.model.tokenizer or start.resolved.tokenizer_dir)
    load = partial(start.grammars, directory, start.config.vocab_size, start.config.eos_token_ids)
    capabilities = start.platform.capabilities
    return ConstrainedDecoding(GrammarCache(load), shape.max_seqs, start.platform.device(),
                               get_ops(capabilities.kernels).token_bitmask, capabilities.pinned_memory)


def _builder(
    platform: Platform, model: Any, attention: PagedBackend, shape: StepShape, sizes: GraphSizes
) -> InputBuilder:
    capabilities = platform.capabilities
    return InputBuilder(
        max_tokens=max(shape.max_tokens, *sizes.decode, 1), max_rows=max(shape.max_seqs, *sizes.decode, 1),
        max_blocks=-(-shape.max_model_len // shape.block_size), block_size=shape.block_size, device=platform.device(),
        pinned=capabilities.pinned_memory, two_rotations=model.rotary_switch > 0, slot_dtype=attention.slot_dtype,
        new_event=platform.new_event if capabilities.streams else None, lora=model.lora is not None,
    )


def _plan_graphs(
    start: _Start, model: Any, backend: type[PagedBackend], spec: Any, shape: StepShape, sizes: GraphSizes,
    progress: Progress,
) -> tuple[GraphSizes, int]:
    """What to capture, the same on all ranks, and the device's bytes that the graphs will take."""
    platform, parallel = start.platform, start.parallel
    if not sizes.decode or platform.capabilities.graph != "capture":
        return sizes, 0
    progress(EngineProgress("Measuring graphs", 0, 1))
    made: list[CapturedGraphs] = []  # with the first capture, which pays for what all share

    def capture(some: GraphSizes) -> None:
        if not made:
            attention = backend(spec)
            attention.allocate_kv_caches(2)
            model.bind_attention(attention)
            builder = _builder(platform, model, attention, shape, sizes)
            made.append(CapturedGraphs(platform, model, attention, builder, parallel.dp.size,
                                       max(sizes.prefill, default=0)))
        made[0].capture(some, lambda done, total: None)

    def release() -> None:
        made.clear()
        model.bind_attention(backend(spec))

    model.reserve_positions(shape.max_model_len)
    costs = measure(platform, capture, release, sizes)
    progress(EngineProgress("Measuring graphs", 1, 1))
    counts = costs.counts(sizes)
    if parallel.world.size > 1:
        found = torch.tensor(counts, dtype=torch.int64, device=platform.device())
        decode, prefill = all_reduce(found, parallel.world, "min").tolist()
        counts = decode, prefill
    return costs.choose(sizes, counts)


def _describe(
    start: _Start, model: Any, shape: StepShape, weights: WeightLoad, memory: tuple[int, int], sizes: GraphSizes
) -> EngineReady:
    """`memory`: KV blocks, the dummy included, and their bytes."""
    settings, config = start.settings, start.config
    return EngineReady(
        model_name=model_name(settings, start.resolved.path), architecture=config.architecture,
        platform=start.platform.name, device=start.platform.device_name(),
        dtype=str(start.dtype).removeprefix("torch."), vocab_size=config.vocab_size,
        max_model_len=shape.max_model_len, eos_token_ids=list(config.eos_token_ids), num_kv_blocks=memory[0] - 1,
        block_size=shape.block_size, max_seqs=shape.max_seqs, max_tokens_per_batch=shape.max_tokens,
        weight_bytes=weights.bytes, kv_cache_bytes=memory[1], graph_sizes=sizes.decode,
        prefill_graph_sizes=sizes.prefill,
        load_seconds=time.monotonic() - start.began, chunked_prefill=settings.scheduler.enable_chunked_prefill,
        tokenizer_dir=str(start.resolved.tokenizer_dir), default_sampling=_default_sampling(config),
        implementation=config.implementation, load_format=settings.model.load_format, weight_loads=[weights],
        steps_together=is_coupled(settings, config), rotary_switch=model.rotary_switch,
    )


def _pooler(start: _Start) -> Pooler | None:
    """With its weights, which stay where they are when the model's sleep."""
    settings, config = start.settings, start.config
    if config.pooling is None:
        return None
    pooler = Pooler(config, Path(settings.model.tokenizer or start.resolved.tokenizer_dir), start.platform.device())
    pooler.load(start.weights, settings.model.load_format == "dummy", max(settings.execution.random_seed, 0))
    return pooler


def _describe_pooling(ready: EngineReady, config: ModelConfig, pooler: Pooler) -> None:
    p = pooler.pooling
    ready.architecture = p.architecture
    if config.encoder is not None:
        ready.chunked_prefill = False
    ready.pooling = PoolingInfo(
        task=p.task, width=pooler.width, all_positions=p.pooling != "last" or config.encoder is not None,
        normalize=p.normalize, activation=p.activation, labels=list(p.labels), matryoshka=p.matryoshka,
        dimensions=list(p.dimensions), pairs=p.pairs, num_types=1 if config.encoder is None else max(
            1, config.encoder.num_types))


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
    platform.configure_process(settings.execution.num_threads or None, rank.ranks_here)
    platform.set_device(0 if shared else max(rank.slot.device, settings.execution.device_id, 0))
    return platform


def _join(settings: Settings, rank: Rank, config: ModelConfig, platform: Platform) -> ParallelState:
    """Meet the other ranks. Their devices are selected, nothing is loaded yet."""
    init, backend = rank.parallel_init(settings, config), settings.parallel.communication_backend
    return ParallelState.initialize(init, platform.collective_backend if backend == "auto" else backend)


def _agree(parallel: ParallelState, platform: Platform, plan: CachePlan) -> CachePlan:
    """The smallest KV cache and the shortest context of all ranks: one scheduler plans for them together."""
    if parallel.world.size == 1:
        return plan
    pages = 0 if plan.virtual is None else plan.virtual.layout.num_pages
    found = torch.tensor([plan.blocks, plan.shape.max_model_len, pages], dtype=torch.int64, device=platform.device())
    blocks, length, pages = all_reduce(found, parallel.world, "min").tolist()
    virtual = None if plan.virtual is None else plan.virtual.with_pages(pages)
    return CachePlan(blocks, dataclasses.replace(plan.shape, max_model_len=length), virtual)


def _resolve(settings: Settings, progress: Progress) -> hub.ResolvedModel:
    m = settings.model

    def on_pull(stage: str, done: int, total: int) -> None:
        """Stages are named like "download bytes", unit last."""
        name, _, unit = stage.rpartition(" ")
        progress(EngineProgress(f"Getting the model: {name}", done, total, "bytes" if unit == "bytes" else ""))

    return hub.resolve_model(m.model, use_modelscope=m.use_modelscope, revision=m.revision, cache_dir=m.download_dir,
                             weights=m.load_format != "dummy", progress=on_pull)
