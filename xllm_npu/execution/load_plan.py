"""What a worker will be, decided before its memory is taken: dtype, step sizes, attention backend, KV blocks, graphs.

Each function answers one question from settings, model and platform, or refuses with a message that says which setting
to change.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.attention.encoder_attention import EncoderAttention
from xllm_models.backends import attention_for, falls_back
from xllm_models.config import ModelConfig
from xllm_platform.base import Platform, PlatformError

from xllm_npu.config.settings import Settings
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.rank import Rank
from xllm_npu.execution.virtual_kv import VirtualKV, plan_virtual_kv
from xllm_npu.memory.kv_capacity import CacheRequest, CacheTooSmall, longest_sequence, num_kv_blocks
from xllm_npu.memory.worker_resources import WorkerMemoryResources

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class StepShape:
    """Sizes that follow from settings, model and device together."""

    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_size: int


def choose_dtype(settings: Settings, config: ModelConfig, platform: Platform) -> torch.dtype:
    """The one asked for, or else the checkpoint's, unless the device is slow in it and not in float32."""
    name = config.torch_dtype if settings.model.dtype == "auto" else settings.model.dtype
    offered = platform.capabilities.dtypes
    if settings.model.dtype == "auto" and name in platform.capabilities.slow_dtypes:
        log.info("this processor is slow in %s: float32 is used, which takes twice the memory; --dtype %s keeps it",
                 name, name)
        name = "float32"
    if name not in offered:
        known = ", ".join(offered)
        raise LoadError(f"Platform {platform.name} does not compute in {name}: set --dtype to one of {known}.")
    return getattr(torch, name)


def step_shape(settings: Settings, config: ModelConfig, platform: Platform) -> StepShape:
    s, asked, longest = settings.scheduler, settings.model.max_model_len, config.max_context_length
    if asked is not None and asked > longest:
        raise LoadError(f"max_model_len is {asked} and the model's positions end at {longest}: lower max_model_len.")
    if config.pooling is not None and config.pooling.max_length and asked is None:
        longest = min(longest, config.pooling.max_length)
    length = asked or longest
    max_tokens = s.max_tokens_per_batch
    if config.encoder is not None:
        return _encoder_shape(settings, length, platform)
    if s.enable_chunked_prefill and "max_tokens_per_batch" not in s.model_fields_set:
        max_tokens = platform.capabilities.default_tokens_per_batch or max_tokens
    if not s.enable_chunked_prefill and max_tokens < length:
        if asked is not None:
            raise LoadError(f"Without chunked prefill a prompt must fit into one step: raise max_tokens_per_batch "
                            f"({max_tokens}) to max_model_len ({length}), or lower max_model_len.")
        length = max_tokens
    return StepShape(length, min(s.max_seqs_per_batch, max_tokens), max_tokens, settings.kv_cache.block_size)


def _encoder_shape(settings: Settings, length: int, platform: Platform) -> StepShape:
    """A prompt is one step, and has one block, which stands for no memory."""
    s, max_tokens = settings.scheduler, settings.scheduler.max_tokens_per_batch
    if "max_tokens_per_batch" not in s.model_fields_set:
        max_tokens = max(length, platform.capabilities.default_tokens_per_batch or max_tokens)
    elif max_tokens < length:
        raise LoadError(f"An encoder computes a prompt in one step: raise max_tokens_per_batch ({max_tokens}) to the "
                        f"longest prompt ({length}), or lower max_model_len to it.")
    return StepShape(length, min(s.max_seqs_per_batch, max_tokens), max_tokens, length)


def choose_attention(
    settings: Settings, platform: Platform, config: ModelConfig, needs: frozenset[str], dtype: torch.dtype
) -> type[PagedBackend]:
    """The one asked for, or the platform's first that computes in `dtype` and has what the model's attention
    `needs`.
    """
    if config.encoder is not None:
        if settings.execution.attention_backend != "auto":
            raise LoadError("An encoder has an attention of its own: leave --attention_backend out.")
        return EncoderAttention
    name, offered = settings.execution.attention_backend, platform.capabilities.attention_backends
    if name != "auto" and name not in offered:
        raise LoadError(f"Platform {platform.name} has no attention backend {name}: "
                        f"set --attention_backend to one of {', '.join(offered)}.")
    backends = {one: attention_for(config, one) for one in offered}
    offered = _computing_in(dtype, backends, name, platform)
    offered = _with_heads_of(config.head_dim, {one: backends[one] for one in offered}, name)
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


def _computing_in(
    dtype: torch.dtype, backends: dict[str, type[PagedBackend]], asked: str, platform: Platform
) -> tuple[str, ...]:
    """The names of those that do; refuses if that leaves none, or not the one asked for."""
    able = tuple(name for name, backend in backends.items() if not backend.dtypes or dtype in backend.dtypes)
    word = str(dtype).removeprefix("torch.")
    if not able:
        raise LoadError(f"No attention backend of platform {platform.name} ({', '.join(backends)}) computes in {word}: "
                        "set --dtype to another.")
    if asked != "auto" and asked not in able:
        others = " or ".join(sorted(str(one).removeprefix("torch.") for one in backends[asked].dtypes))
        raise LoadError(f"Attention backend {asked} does not compute in {word}: set --dtype to {others}, or "
                        f"--attention_backend to auto or to one of {', '.join(able)}.")
    return able


def _with_heads_of(head_dim: int, backends: dict[str, type[PagedBackend]], asked: str) -> tuple[str, ...]:
    """The names of those that take such heads; refuses if that leaves not the one asked for."""
    able = tuple(name for name, backend in backends.items() if not backend.head_sizes or head_dim in backend.head_sizes)
    if asked != "auto" and asked not in able:
        known = ", ".join(map(str, sorted(backends[asked].head_sizes)))
        raise LoadError(f"The model's heads have {head_dim} values, and attention backend {asked} takes {known}: set "
                        f"--attention_backend to auto or to one of {', '.join(able)}.")
    return able


@dataclass(slots=True, frozen=True)
class CachePlan:
    """The KV cache to be: blocks (the dummy included), and how it lies in virtual memory if it does."""

    blocks: int
    shape: StepShape  # with a max_model_len nobody asked for cut to what the cache holds
    virtual: VirtualKV | None = None


def plan_cache(
    settings: Settings, rank: Rank, platform: Platform, backend: type[PagedBackend], spec: Any,
    config: ModelConfig, shape: StepShape, graph_bytes: int = 0, weights: WorkerMemoryResources | None = None,
) -> CachePlan:
    """Leaves `graph_bytes` to graphs. `weights`: the virtual memory that they are in, if they are."""
    if config.encoder is not None:
        return CachePlan(shape.max_seqs + 1, shape, None)
    kv, memory = settings.kv_cache, platform.memory_info()
    explicit = "max_memory_utilization" in kv.model_fields_set
    sharers = num_sharers(rank, platform)
    workspace = workspace_bytes(config, shape, settings.parallel.dp_size)
    elastic, blocks = kv.enable_vmm_kvcache and kv.vmm_elastic, 0
    if not elastic:
        blocks = num_kv_blocks(CacheRequest(
            bytes_per_block=backend.kv_bytes_per_block(spec), block_size=shape.block_size,
            max_model_len=shape.max_model_len, max_seqs=shape.max_seqs, free_bytes=memory.free // sharers,
            total_bytes=memory.total // sharers, workspace_bytes=workspace, graph_bytes=graph_bytes,
            utilization=kv.max_memory_utilization, max_cache_bytes=kv.max_cache_size,
            soft_limit_bytes=0 if explicit else platform.capabilities.default_cache_bytes,
        ))
    usable, virtual = blocks, None
    if kv.enable_vmm_kvcache:
        virtual = plan_virtual_kv(
            kv, platform, backend, spec, sharers=sharers, blocks=blocks,
            most_blocks=-(-shape.max_model_len // shape.block_size) * shape.max_seqs + 1, workspace_bytes=workspace,
            ledger=rank.open_ledger(platform) if weights is None else None, memory=weights)
        blocks = usable = virtual.num_blocks
        if not settings.service.evict_idle_models:  # else other models will make room
            usable = virtual.usable_blocks
    return CachePlan(blocks, _fitting_shape(settings, shape, usable), virtual)


def _fitting_shape(settings: Settings, shape: StepShape, blocks: int) -> StepShape:
    """One sequence alone must fit."""
    longest = longest_sequence(blocks, shape.block_size)
    if longest >= shape.max_model_len:
        return shape
    if longest <= 0:
        raise CacheTooSmall("There is no memory for the KV cache now: free some, or lower vmm_memory_reserve_bytes, "
                            "block_size or max_tokens_per_batch.")
    if settings.model.max_model_len is not None:
        raise CacheTooSmall(f"The KV cache holds {longest} tokens and max_model_len is {shape.max_model_len}: lower "
                            f"max_model_len, or raise max_cache_size or max_memory_utilization.")
    log.warning("max_model_len is lowered from %d to %d, what the KV cache holds", shape.max_model_len, longest)
    return dataclasses.replace(shape, max_model_len=longest)


def num_sharers(rank: Rank, platform: Platform) -> int:
    """Ranks that take from the memory that this one sees."""
    return rank.ranks_here if platform.capabilities.shared_memory else 1


def workspace_bytes(config: ModelConfig, shape: StepShape, dp_size: int) -> int:
    """A generous bound on what the largest step needs beside weights and cache: activations, logits, sampling."""
    widest = config.hidden_size * 6 + config.intermediate_size * 3 + config.attention_width
    experts = 0
    if config.moe is not None:  # rows of all data-parallel ranks may come here, each for all of its experts
        experts = dp_size * (config.hidden_size * 3 + config.moe.top_k * config.moe.intermediate_size * 3)
    return shape.max_tokens * (widest + experts) * 4 + shape.max_seqs * config.vocab_size * 4 * 3


def graph_sizes(
    settings: Settings, platform: Platform, backend: type[PagedBackend], shape: StepShape
) -> list[int]:
    if not settings.execution.enable_graph:
        return []
    capabilities = platform.capabilities
    if capabilities.graph == "none":
        raise PlatformError(f"Platform {platform.name} has no graph mode: turn enable_graph off.")
    if capabilities.graph == "capture" and not backend.capture_safe:
        raise LoadError(f"The attention backend {backend.__name__} reads lengths on the host and cannot be captured "
                        "in a graph: turn enable_graph off.")
    if backend.host_lengths and platform.graph_backend().tasks is None:
        raise LoadError(f"The attention backend {backend.__name__} is told lengths by the host, which graphs of "
                        f"platform {platform.name} cannot take: choose another with --attention_backend, or turn "
                        "enable_graph off.")
    if capabilities.graph == "capture" and settings.parallel.expert_parallel_degree == 2:
        raise LoadError("With expert_parallel_degree=2 devices tell each other in each layer how many tokens come, "
                        "which no graph can hold: turn enable_graph off, or set expert_parallel_degree to 1.")
    wanted = settings.execution.graph_batch_sizes or capabilities.default_graph_sizes
    limit = min(shape.max_seqs, settings.execution.max_tokens_for_graph_mode)
    return sorted({min(size, limit) for size in wanted})


SMALLEST_PREFILL_GRAPH = 64  # tokens; fewer are padded to it


def prefill_graph_sizes(settings: Settings, platform: Platform, shape: StepShape) -> list[int]:
    """Numbers of tokens to capture steps with prompts for: powers of two, and the most that a step may have."""
    execution = settings.execution
    if not execution.enable_prefill_piecewise_graph:
        return []
    if not execution.enable_graph:
        raise LoadError("enable_prefill_piecewise_graph adds to the graphs of enable_graph: turn that on too, or "
                        "enable_prefill_piecewise_graph off.")
    if platform.capabilities.graph != "capture":
        raise LoadError(f"Platform {platform.name} compiles decode steps and captures no graphs, so those with prompts "
                        "cannot be captured in pieces: turn enable_prefill_piecewise_graph off.")
    limit = min(shape.max_tokens, execution.max_tokens_for_graph_mode)
    return [*takewhile(lambda size: size < limit, (SMALLEST_PREFILL_GRAPH << i for i in count())), limit]
