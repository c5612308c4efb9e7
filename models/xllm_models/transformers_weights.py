"""Weights into a network of transformers: through our own loader where the checkpoint's names are the modules' names,
else through transformers' loading, which renames and fuses. safetensors only, in both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging as hf_logging

from xllm_models.placement import Placement
from xllm_models.weight_memory import empty_weight
from xllm_models.weights.dummy_source import DummySource
from xllm_models.weights.loader import Progress, check_placements, fill
from xllm_models.weights.source import WeightError, WeightSource

log = logging.getLogger(__name__)

_NAMED = 5  # tensors an error message lists


def stored_tensors(network: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter and persistent buffer once, with all its names."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def keep_in_float32(network: Any, dtype: torch.dtype) -> nn.Module:
    """What transformers keeps in float32 whatever the model's dtype is."""
    patterns = list(network._get_dtype_plan(dtype))
    if patterns:
        alternation = build_glob_alternation(patterns)[0]
        for names, tensor in stored_tensors(network):
            if any(alternation.search(name) for name in names):
                tensor.data = tensor.data.float()
    return network


def move_weights(network: nn.Module, device: torch.device) -> bool:
    """Every stored tensor becomes one that `empty_weight` gives; tied ones stay tied. Parameters lose their values,
    buffers keep theirs. False: the allocator only counts, and nothing has moved.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the old one, which keeps it its own; the new

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            memory = empty_weight(tuple(tensor.shape), tensor.dtype, device)
            if memory.is_meta:
                memory = tensor
            elif isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=False)
            else:
                memory.copy_(tensor)
            moved[id(tensor)] = tensor, memory
        return moved[id(tensor)][1]

    for module in network.modules():
        for parameters in (module._parameters, module._buffers):
            for name, tensor in parameters.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    parameters[name] = place(tensor)  # type: ignore[assignment]
    return all(old is not new for old, new in moved.values())


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """From one network into another of the same class and ties. Raises WeightError if they differ."""
    found = {names[0]: tensor for names, tensor in stored_tensors(source)}
    wanted = {names[0]: tensor for names, tensor in stored_tensors(target)}
    wrong = found.keys() ^ wanted.keys() or {name for name in found if found[name].shape != wanted[name].shape}
    if wrong:
        raise WeightError(f"transformers loads these weights into another network than config.json describes: "
                          f"{', '.join(sorted(wrong)[:_NAMED])} differ. Turn enable_vmm_weights off.")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


def check_network(network: nn.Module, source: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """What `load_network` would find wrong in headers. Raises WeightError.

    `shapes`: of the checkpoint that was loaded last. Where transformers translates names, another one must have them.
    """
    placements = _own_placements(network, source)
    if placements is not None:
        check_placements(placements, source)
        return
    found = {name: info.shape for name, info in source.tensors.items()}
    wrong = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if wrong:
        raise WeightError(f"{source.path}: {len(wrong)} tensors are missing, in excess or of another shape than in the "
                          f"checkpoint that is served: {', '.join(wrong[:_NAMED])}.")
    source.check_types(found)


def load_network(
    network: nn.Module, source: WeightSource, arguments: dict[str, Any], progress: Progress | None
) -> tuple[nn.Module, tuple[int, int]]:
    """-> (the network, or another one in its place, and (bytes, tensors) loaded). Raises WeightError.

    `arguments` are from_pretrained's.
    """
    placements = _own_placements(network, source)
    if placements is not None:
        return network, fill(placements, source, progress)
    log.info("%s is loaded by transformers: its names are not those of the modules", source.path)
    network = _load_by_transformers(source, arguments)
    tensors = [tensor for _, tensor in stored_tensors(network)]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if progress is not None:
        progress(total, total)
    return network, (total, len(source.tensors))


def _own_placements(network: Any, source: WeightSource) -> dict[str, Placement] | None:
    """None where names must be translated, tensors rearranged, or tied ones are there twice (and may differ)."""
    if get_model_conversion_mapping(network, add_legacy=False) and not isinstance(source, DummySource):
        return None
    placements = {}
    for names, tensor in stored_tensors(network):
        present = [name for name in names if name in source.tensors]
        if len(present) != 1:
            return None
        placements[present[0]] = Placement(tensor, tuple(tensor.shape))
    return placements


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers draws no progress bars into our output."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _load_by_transformers(source: WeightSource, arguments: dict[str, Any]) -> nn.Module:
    try:
        with _no_bars():
            network, info = AutoModelForCausalLM.from_pretrained(
                source.path, use_safetensors=True, local_files_only=True, trust_remote_code=False,
                output_loading_info=True, **arguments)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise WeightError(f"{source.path}: transformers cannot load these weights ({text}). Check that weights and "
                          "config.json belong together and that the download is complete.") from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing or info["error_msgs"]:
        rest = f", and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise WeightError(f"{source.path} lacks tensors of the model, or has them in another shape: "
                          f"{', '.join(missing[:_NAMED]) or info['error_msgs'][0]}{rest}. Check that weights and "
                          "config.json belong together and that the download is complete.")
    return network
