"""Times the bare network: one decode step (batch 1 and 16, context 192 and 1024) and the prefill of 1024 tokens.

No scheduler, no sampler: forward, then logits of the last positions. Medians; sequences have blocks of their own.
Usage: python benchmarks/decode_model.py MODEL_DIR [--dtypes bfloat16,float32] [--threads 2] [--compile] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / part) for part in ("platform", "kernels_npu", "models"))]

from xllm_platform.cpu.device import CpuPlatform  # noqa: E402

DECODES = ((1, 192), (1, 1024), (16, 192), (16, 1024))
PREFILL = 1024
BLOCK_SIZE = 128


def make_input(rows: int, new: int, context: int):  # type: ignore[no-untyped-def]
    """`rows` sequences with `new` tokens each, the last of which is token number `context`."""
    import numpy as np
    import torch
    from xllm_models.forward_input import AttentionMetadata, ForwardInput

    width = -(-context // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32) + 1
    positions = np.tile(np.arange(context - new, context), rows)
    owners = np.repeat(np.arange(rows), new)
    slots = table[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(0, rows * new + 1, new, dtype=np.int32)
    lengths = np.full(rows, context, np.int32)
    decodes = rows if new == 1 else 0
    metadata = AttentionMetadata(
        num_decodes=decodes, num_prefills=rows - decodes, query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths), block_table=torch.from_numpy(table), slot_mapping=torch.from_numpy(slots),
        query_start_host=starts, seq_lens_host=lengths, max_seq_len=context)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(5, 250, rows * new))
    return ForwardInput(tokens, torch.from_numpy(positions.astype(np.int64)), metadata)


def median_ms(run: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def measure(model_dir: str, dtype_name: str, compiled: bool, seconds: float) -> dict[str, float]:
    """{case: milliseconds}"""
    import torch
    from xllm_models.backends import get_attention
    from xllm_models.config import ModelConfig
    from xllm_models.registry import build_model
    from xllm_models.weights.loader import load_weights
    from xllm_models.weights.source import open_source

    model = build_model(ModelConfig.from_path(model_dir), dtype=getattr(torch, dtype_name), kernels="cpu")
    load_weights(model, open_source(model_dir))
    backend = get_attention("numba")(model.attention_spec(BLOCK_SIZE))
    backend.allocate_kv_caches(1 + 16 * (1024 // BLOCK_SIZE))
    model.bind_attention(backend)
    decode = model.compile_decode() if compiled else model.forward

    def step(forward, inputs):  # type: ignore[no-untyped-def]
        backend.prepare(inputs.attention)
        hidden = forward(inputs)
        return model.compute_logits(hidden[inputs.attention.query_start[1:].long() - 1])

    found = {}
    with torch.inference_mode():
        for rows, context in DECODES:
            inputs = make_input(rows, 1, context)
            found[f"decode b{rows} ctx{context}"] = median_ms(lambda i=inputs: step(decode, i), seconds)  # type: ignore[misc]
        inputs = make_input(1, PREFILL, PREFILL)
        found[f"prefill {PREFILL}"] = median_ms(lambda: step(model.forward, inputs), seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action="store_true", help="decode through compile_decode()")
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, for each case")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    platform = CpuPlatform()
    platform.configure_process(args.threads)

    import torch

    results = {d: measure(args.model, d, args.compile, args.seconds) for d in args.dtypes.split(",")}
    mode = "compiled" if args.compile else "eager"
    print(f"{Path(args.model).name}: torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{platform.device_name()}, {mode} decode; median milliseconds")
    for dtype, cases in results.items():
        for case, ms in cases.items():
            print(f"{dtype:10} {case:20} {ms:9.2f}")
    if args.json:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "compiled": args.compile,
                          "model": Path(args.model).name, "ms": results}))


if __name__ == "__main__":
    main()
