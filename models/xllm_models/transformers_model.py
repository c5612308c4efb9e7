"""Any decoder-only architecture of transformers through its own modelling code, with our paged attention inside.

The network is transformers'; batches are flat as everywhere here ([1, T] with explicit positions, no cache and no mask
of transformers' own). One device only. Before the model is used, `attention_spec` records what its layers ask of
attention and `bind_attention` compares a chunked trial with transformers' own attention, so that an architecture whose
code does not fit (state beside the cache, positions counted elsewhere, biases, other patterns) is refused at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from xllm_platform.parallel import ParallelState

from xllm_models.attention.base import AttentionBackend, AttentionSpec, LayerAttention
from xllm_models.config import ModelConfig
from xllm_models.forward_input import ForwardInput
from xllm_models.placement import Placement
from xllm_models.transformers_attention import PAGED, PROBE, LayerCall, PagedRun, UnservedAttention, paged, probing
from xllm_models.transformers_config import hf_config
from xllm_models.transformers_trial import run_trial
from xllm_models.transformers_weights import (
    check_network,
    copy_weights,
    keep_in_float32,
    load_network,
    move_weights,
    stored_tensors,
)
from xllm_models.weight_memory import weights_stay
from xllm_models.weights.loader import Progress
from xllm_models.weights.source import WeightSource

log = logging.getLogger(__name__)

_PROBE_TOKENS = 2
_OWN_ATTENTION = ("its layers do not call transformers' attention interface (they compute attention, or something "
                  "else, in a way of their own)")


class TransformersRefusal(ValueError):
    """This architecture's code cannot run on the paged cache; the message says why."""


class _Given:
    """Stands for a body's output of any class: hidden states, and None for whatever else is asked."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden  # [1, S, hidden]

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


class TransformersModel(nn.Module):
    """LlamaForCausalLM's interface around a network of transformers."""

    rotary_switch = 0
    lora = None  # it takes no adapters

    network: Any  # PreTrainedModel

    def __init__(
        self, config: ModelConfig, *, ops: ModuleType, dtype: torch.dtype, device: torch.device,
        parallel: ParallelState, storage_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.storage_dtype = storage_dtype or dtype
        if parallel.tp.size > 1 or parallel.ep.size > 1:
            raise self._refusal("it runs on one device only. Set --tp_size 1 and --ep_size 1; --dp_size may be larger")
        self._calls: list[LayerCall] = []
        self._layers: list[LayerAttention] = []
        self._backend: AttentionBackend | None = None
        self._given: torch.Tensor | None = None  # hidden states that stand for the layers' output, see compute_logits
        self._stays_in_place = weights_stay()  # in memory of somebody's
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the checkpoint's tensors, once one is loaded
        network = self._empty_network()
        if self._stays_in_place and move_weights(network, self.device):
            network.to(self.device)  # buffers that are computed
        self._adopt(network)

    def _empty_network(self) -> Any:
        """Parameters are allocated and not initialised, buffers are computed; all on the CPU if they are to move."""
        try:
            with torch.device("cpu" if self._stays_in_place else self.device), no_init_weights():
                network = AutoModelForCausalLM.from_config(
                    self._hf_config(), dtype=self.dtype, attn_implementation=PAGED, trust_remote_code=False)
        except Exception as error:
            if isinstance(error, KeyError) and PAGED in str(error):
                raise self._refusal(_OWN_ATTENTION) from error
            raise self._refusal(f"transformers cannot build it ({_line(error)})") from error
        if getattr(network, "_is_stateful", False):
            raise self._refusal("its layers keep a state beside the KV cache (linear attention, SSM or convolution)")
        network.tie_weights()
        return keep_in_float32(network, self.dtype)

    def _hf_config(self) -> Any:
        config = hf_config(self.config.raw)
        for one in (config, config.get_text_config()):
            one.use_cache, one.return_dict = False, True
            one.output_attentions = one.output_hidden_states = False
            if hasattr(one, "output_router_logits"):
                one.output_router_logits = False
        return config

    def _adopt(self, network: Any) -> None:
        """Take `network` and put a switch before the forward of its layers."""
        body = network.get_decoder()
        body = getattr(network, "model", network) if body is network else body
        if body is network:
            raise self._refusal("its layers and its head are one module")
        self.network = network.eval().requires_grad_(False)
        self._body, self._run_body = [body], body.forward  # in a list: it is part of `network` already
        body.forward = self._body_or_given

    def _body_or_given(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is not None:
            return _Given(self._given[None])
        return self._run_body(*args, **kwargs)

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """[attention layers]; 0: the layer sees everything."""
        return tuple(call.sliding_window for call in self._probed())

    def placements(self) -> dict[str, Placement]:
        """By the modules' own names, a tied tensor once."""
        return {names[0]: Placement(tensor, tuple(tensor.shape)) for names, tensor in stored_tensors(self.network)}

    def check_from(self, source: WeightSource) -> None:
        """Raises WeightError unless another checkpoint fits, as far as headers say, once one is loaded."""
        check_network(self.network, source, self._shapes)

    def load_from(self, source: WeightSource, progress: Progress | None = None) -> tuple[int, int]:
        """-> (bytes, tensors) loaded. Raises WeightError."""
        network, done = load_network(self.network, source, self._reload_arguments(), progress)
        if network is not self.network and self._stays_in_place:
            copy_weights(network, self.network)
        elif network is not self.network:
            self._adopt(network.to(self.device))
        self._shapes = {name: info.shape for name, info in source.tensors.items()}
        return done

    def _reload_arguments(self) -> dict[str, Any]:
        return {"config": self._hf_config(), "dtype": self.dtype, "attn_implementation": PAGED}

    def finalize_weights(self) -> None:
        """Round to the storage dtype if it is narrower."""
        if self.storage_dtype != self.dtype:
            for parameter in self.parameters():
                parameter.data.copy_(parameter.data.to(self.storage_dtype))
        if self._layers:  # loaded anew: sinks may have been copied
            self._calls = self._probe()
            self._layers = [_layer(i, call) for i, call in enumerate(self._calls)]

    def allocate_weights(self) -> None:
        """Nothing is packed here, so that weights can be loaded again in place."""

    def attention_spec(self, block_size: int) -> AttentionSpec:
        calls = self._probed()
        return AttentionSpec(len(calls), calls[0].num_heads, max(call.num_kv_heads for call in calls),
                             max(call.head_dim for call in calls), block_size, self.storage_dtype, self.device)

    @property
    def attention_needs(self) -> frozenset[str]:
        """Extras that a backend must have, see AttentionBackend.features."""
        return frozenset().union(*(_layer(i, call).needs for i, call in enumerate(self._probed())))

    def _probed(self) -> list[LayerCall]:
        if not self._calls:
            self._calls = self._probe()
        return self._calls

    @torch.inference_mode()
    def _probe(self) -> list[LayerCall]:
        """The attention calls of one forward pass. Raises TransformersRefusal."""
        device = next(self.network.parameters()).device  # the CPU, where memory is only being planned
        tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
        positions = torch.arange(_PROBE_TOKENS, device=device)[None]
        with probing() as calls, self.attention_from(PROBE):
            try:
                self._hidden(tokens, positions)
            except UnservedAttention as error:
                raise self._refusal(str(error)) from error
            except Exception as error:
                raise self._refusal(f"its code does not take a flat batch ({_line(error)})") from error
        self._check_calls(calls)
        return calls

    def _check_calls(self, calls: list[LayerCall]) -> None:
        seen = {call.layer for call in calls if call.layer is not None}
        missing = sorted(set(range(self.config.num_layers)) - seen)
        if missing and len(calls) < self.config.num_layers:
            raise self._refusal(f"layers {missing} do not call transformers' attention interface" if calls
                                else _OWN_ATTENTION)
        most = max(call.num_kv_heads for call in calls)
        if {call.num_heads for call in calls} != {calls[0].num_heads} or any(most % c.num_kv_heads for c in calls):
            shapes = sorted({(call.num_heads, call.num_kv_heads) for call in calls})
            raise self._refusal(f"its layers differ in (query heads, key heads): {shapes}")

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Raises TransformersRefusal if a trial on a small cache of its own differs from transformers' attention."""
        self._calls = self._probe()  # with the weights in place: sinks are among them
        self._layers = [_layer(i, call) for i, call in enumerate(self._calls)]
        self._backend = type(backend)(backend.spec)
        try:
            problem = run_trial(self, self._backend)
        except Exception as error:
            raise self._refusal(f"a trial of its code failed ({_line(error)})") from error
        if problem:
            raise self._refusal(problem)
        self._backend = backend

    def reserve_positions(self, max_positions: int) -> None:
        """The network's own tables hold max_position_embeddings from the start."""

    def forward(self, input: ForwardInput) -> torch.Tensor:
        """-> [T, hidden], after the final norm."""
        assert self._backend is not None, "bind_attention comes before the first forward"
        with paged(PagedRun(self._layers, self._backend)):
            return self._hidden(input.token_ids[None], input.positions[None])[0]

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens, positions [1, T] -> [1, T, hidden]"""
        return self._body[0](input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state

    @torch.inference_mode()
    def reference_hidden(self, tokens: torch.Tensor, attention: str) -> torch.Tensor:
        """tokens [T], one whole sequence -> [T, hidden] by transformers' own attention, eager or sdpa."""
        positions = torch.arange(tokens.shape[0], device=tokens.device)
        with self.attention_from(attention):
            return self._hidden(tokens[None], positions[None])[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> [S, vocab] float32, by the network's own head, scales and caps included."""
        self._given = hidden
        try:
            tokens = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            return self.network(input_ids=tokens, use_cache=False).logits[0].float()
        finally:
            self._given = None

    @contextmanager
    def attention_from(self, name: str) -> Iterator[None]:
        """The network's attention function is another one inside."""
        configs: list[Any] = [m.config for m in self.network.modules() if hasattr(m, "config")]
        try:
            for config in configs:
                config._attn_implementation = name
            yield
        finally:
            for config in configs:
                config._attn_implementation = PAGED

    def compile_decode(self) -> Callable[[ForwardInput], torch.Tensor]:
        raise self._refusal("it cannot be captured in graphs: turn enable_graph off")

    def _refusal(self, why: str) -> TransformersRefusal:
        return TransformersRefusal(f"{self.config.architecture} cannot be served through transformers' code: {why}.")


def _layer(index: int, call: LayerCall) -> LayerAttention:
    sinks = None if call.sinks is None else call.sinks.detach().float()
    return LayerAttention(index, call.scale, call.sliding_window, call.softcap, sinks)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
