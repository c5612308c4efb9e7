"""All kernels of this package, one line a file. Importing this imports no Triton; `load` does."""

from __future__ import annotations

import importlib

from xllm_kernels_npu.kernel import Kernel

MODULES: dict[str, str] = {
    "rms_norm": "x * rsqrt(mean(x^2) + eps) * weight",
    "kv_store": "new keys and values, or latents, to their slots of the paged cache",
    "paged_decode": "attention of one query token a row over the paged cache, keys split over cores",
    "paged_prefill": "causal attention of prompts, chunks and what follows a cached prefix over the paged cache",
    "mla_decode": "latent attention of one query token a row, projections absorbed",
    "add_rms_norm": "x + residual, and the RMS norm of it",
    "rotary": "rotation of query and key heads, with their norms before; halves or interleaved, whole or partial",
    "swiglu": "silu(gate) * up",
    "swiglu_quant": "silu(gate) * up as int8, one scale a token",
    "decode_input": "tokens, positions, lengths and slots of a decode step",
    "token_bitmask": "minus infinity for tokens that a grammar forbids",
    "penalties": "repetition, frequency and presence penalties",
    "sampling": "one token a row by temperature, min_p, top_k, top_p and given noise, no sort",
}


def load(module: str) -> tuple[Kernel, ...]:
    """The kernels of `module`, its KERNELS. Raises ImportError where neither triton-ascend nor triton is installed."""
    found: tuple[Kernel, ...] = importlib.import_module(f"xllm_kernels_npu.{module}").KERNELS
    return found
