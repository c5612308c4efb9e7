"""The HTTP server in a process of its own under 64 streaming clients: a 1B-shaped model with dummy weights.

Prompts are token ids that the server has not seen; answers are of fixed length. Times are the client's.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import own_tests  # noqa: F401
import shapes
from load_client import Record, Target, drive_closed
from part import Part
from server_process import MODEL_NAME, Server, free_port, ours
from serving import summarize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_tokenizer import SPECIALS, write_tokenizer

CONCURRENCY, REQUESTS, PROMPT, OUTPUT = 64, 256, 256, 128


def write_model(folder: Path, shape: str) -> Path:
    """A configuration, and a tokenizer with a word for every id: bytes, then made-up words."""
    directory = shapes.write(folder, shape)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(shapes.SHAPES[shape]["vocab_size"] - len(alphabet) - len(SPECIALS))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    write_tokenizer(directory, tokenizer)
    return directory


def bodies(count: int, prompt: int, output: int, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return [msgspec.json.encode({
        "model": MODEL_NAME, "prompt": [draw.randrange(250) for _ in range(prompt)], "max_tokens": output,
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }) for _ in range(count)]  # fmt: skip


def load(url: str, requests: list[bytes], concurrency: int) -> tuple[list[Record], float]:
    """Every request's record, and the seconds that all took."""
    began = time.perf_counter()
    records = asyncio.run(drive_closed(Target(url, MODEL_NAME, timeout_s=60), requests, concurrency))
    return records, time.perf_counter() - began


def measure(part: Part, directory: Path, graph: bool) -> dict[str, Any]:
    concurrency, requests, prompt, output = (4, 8, 16, 8) if part.dry_run else (CONCURRENCY, REQUESTS, PROMPT, OUTPUT)
    flags = ["--platform", part.platform_name, "--load-format", "dummy", "--max-seqs-per-batch", str(concurrency)]
    flags += ["--enable-graph"] if graph else []
    flags += ["--max-cache-size", "20MiB", "--num-threads", "1", "--block-size", "16"] if part.dry_run else []
    dtype, port = "float32" if part.dry_run else "bfloat16", free_port()
    try:
        with Server(ours(directory, dtype, port, 1024, flags), port, part.seconds_left) as server:
            load(server.url, bodies(concurrency, prompt, 4, seed=1), concurrency)
            records, wall = load(server.url, bodies(requests, prompt, output, seed=2), concurrency)
            started = server.start_s
    except SystemExit as failure:  # how the benchmarks' server says that it did not come up
        raise RuntimeError(str(failure)) from None
    figures = summarize(records, wall)
    errors = sorted({record.error for record in records if record.error})
    return {
        "ok": not errors, "detail": "; ".join(errors)[:400], "concurrency": concurrency, "prompt": prompt,
        "output": output, "start_s": round(started, 1), **{name: round(value, 2) for name, value in figures.items()},
        "show": f"{figures['output_tok_s']:9,.0f} tok/s out, TTFT p50 {figures['ttft_ms_p50']:,.0f} ms, "
                f"ITL p50 {figures['itl_ms_p50']:.1f} p99 {figures['itl_ms_p99']:.1f} ms",
    }  # fmt: skip


def main() -> None:
    part = Part()
    capabilities = part.platform().capabilities
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), "tiny" if part.dry_run else "1B")
        for graph in (True, False) if capabilities.graph == "capture" else (False,):
            with part.check(f"HTTP, {'graph' if graph else 'eager'}") as found:
                part.need(15)
                found |= measure(part, directory, graph)


if __name__ == "__main__":
    main()
