"""What structured output costs the host in one decode step: the masks, and the parsers' step from token to token.

A batch of sequences writes JSON of one schema at random. Masks are made on a thread while the device runs the network,
so that their time counts only where it is the longer of the two; the parsers' step always counts.

    python benchmarks/structured_output.py [--json] [--rows 64] [--steps 100] [--threads 1] [--model MODEL]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version

import llguidance
import llguidance.numpy
import numpy as np
from xllm_models.hub import DEFAULT_MODEL, resolve_model

from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import MatcherFactory
from xllm_npu.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string",
                    "pattern": "^[0-9]{5}$"}}, "required": ["street", "zip"], "additionalProperties": False},
    },
    "required": ["name", "age", "email", "tags", "address"], "additionalProperties": False,
}  # fmt: skip


def measure(factory: MatcherFactory, rows: int, steps: int, threads: int) -> dict[str, float]:
    """Milliseconds."""
    began = time.perf_counter()
    prototype = factory.matcher(structured_output.json_schema(SCHEMA))
    figures = {"compile": time.perf_counter() - began}
    executor, rng = llguidance.LLExecutor(threads), np.random.default_rng(0)
    words = (factory.vocab_size + 31) // 32
    bitmask = np.zeros((rows, words), np.int32)
    matchers = [prototype.deep_copy() for _ in range(rows)]
    masks, moves = [], []
    for _ in range(steps):
        began = time.perf_counter()
        executor.unsafe_compute_mask_ptr(
            [(m, i) for i, m in enumerate(matchers)], bitmask.ctypes.data, 4 * words, rows)
        masks.append(time.perf_counter() - began)
        tokens = [_draw(rng, row) for row in bitmask]
        began = time.perf_counter()
        for matcher, token in zip(matchers, tokens):
            if not matcher.is_stopped():
                matcher.consume_token(token)
        moves.append(time.perf_counter() - began)
        matchers = [prototype.deep_copy() if m.is_stopped() else m for m in matchers]
    for name, times in (("masks", masks), ("tokens taken", moves)):
        figures[f"{name}, median"] = statistics.median(times)
        figures[f"{name}, slowest of twenty"] = statistics.quantiles(times, n=20)[-1]
    return {name: 1e3 * seconds for name, seconds in figures.items()}


def _draw(rng: np.random.Generator, row: np.ndarray) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="that make masks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = Tokenizer(resolve_model(args.model, weights=False).tokenizer_dir)
    assert tokenizer.eos_token_id is not None
    began = time.perf_counter()
    factory = MatcherFactory(tokenizer.to_json(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    figures = {"tables of the tokens": 1e3 * (time.perf_counter() - began),
               **measure(factory, args.rows, args.steps, args.threads)}
    print(f"llguidance {version('llguidance')}, Python {platform.python_version()}, {args.model} with "
          f"{tokenizer.vocab_size:,} tokens, {args.rows} rows, {args.threads} threads for masks")
    for name, value in figures.items():
        print(f"{name:<32} {value:10.2f} ms")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
