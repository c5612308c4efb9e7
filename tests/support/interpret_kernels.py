"""Runs kernels, or the Triton attention backend, in upstream Triton's interpreter on the CPU in float32.

    TRITON_INTERPRET=1 python -m tests.support.interpret_kernels

A process of its own, since the variable decides when Triton is imported. Prints one JSON object: what was compared ->
the largest difference, of what is allowed.
"""

from __future__ import annotations

import json
import os

import torch
from xllm_kernels_npu import registry
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.attention.mla_base import MlaSpec
from xllm_models.backends import get_attention, get_mla_attention

from tests.support import kernel_calls
from tests.support.paged_model import BlockTables

CPU = torch.device("cpu")
STEPS = (  # of (sequence, new tokens)
    [(0, 33), (1, 17), (2, 2)],
    [(3, 1), (0, 1), (1, 20), (4, 16)],  # decodes beside a chunk on a prefix and a prompt
    [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
)


def kernels() -> dict[str, float]:
    return {f"{module}: {call.name}": kernel_calls.worst(call.run(), call.reference())
            for module in registry.MODULES if module in kernel_calls.CALLS
            for call in kernel_calls.calls(module, kernel_calls.Where(CPU, torch.float32))}


def backend() -> dict[str, float]:
    """The backend "triton" against "torch"."""
    spec = AttentionSpec(2, 6, 2, 24, 16, torch.float32, CPU)
    layers = (LayerAttention(0, 0.2), LayerAttention(1, 0.2, 20, 4.0, torch.randn(6)))

    def parts(tokens: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(tokens, 10, 24).split([6, 2, 2], dim=1)

    latents = MlaSpec(1, 5, 24, 8, 12, 16, 16, torch.float32, CPU)
    up = torch.randn(5, 28, 24)

    def latent_parts(tokens: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(tokens, 5, 20), torch.randn(tokens, 32), up

    found = {}
    for name, get, one_spec, of_step, its_layers in (
        ("attention", get_attention, spec, parts, layers),
        ("latent attention", get_mla_attention, latents, latent_parts, (LayerAttention(0, 0.2),)),
    ):
        both = [get(which)(one_spec) for which in ("triton", "torch")]  # type: ignore[operator]
        blocks = BlockTables(32, 16)
        for one in both:
            one.allocate_kv_caches(32)
        for number, rows in enumerate(STEPS):
            metadata, _ = blocks.metadata(rows)
            for one in both:
                one.prepare(metadata)
            for layer in its_layers:
                given = of_step(sum(n for _, n in rows))
                ours, expected = (one.forward(layer, *given) for one in both)
                found[f"{name}, step {number}, layer {layer.layer}"] = kernel_calls.worst(ours, expected)
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.manual_seed(0)
    print(json.dumps(kernels() | backend()))
