"""Embeddings a second of an encoder or decoder, and of transformers on the same texts with the same threads.

The engine runs in this process, without HTTP; transformers gets the texts in batches of 32, the longest first, as
sentence-transformers does. Both pool and normalize; the largest difference between their embeddings is printed too.

    python benchmarks/embeddings.py MODEL_DIRECTORY [--json] [--texts 256] [--threads 1] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.pooled_rows import pool_plainly
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.master.request_factory import POOLING_PARAMS
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest
from xllm_npu.text.tokenizer import Tokenizer

SENTENCE = """the of and to in is that it was for on are with as be at one have this from or had by hot but some what
there we can out other were all your when use word how said an each she which do their time if will way about many then
them would write like so these her long make thing see him two has look more day"""
BATCH = 32


def make_texts(count: int) -> list[str]:
    rng, words = random.Random(0), SENTENCE.split()
    return [" ".join(rng.choices(words, k=rng.randint(5, 80))) for _ in range(count)]


def ours(loop: EngineLoop, tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    found: dict[int, np.ndarray] = {}
    for i, text in enumerate(texts):
        prompt = np.array(tokenizer.encode(text), np.int32).tobytes()
        loop.submit(AddRequest(request_id=i, external_id=str(i), prompt=prompt, params=POOLING_PARAMS,
                               arrival_time=time.time()))
    while loop.has_work():
        outputs = loop.step()
        for key, vector in (outputs.vectors if outputs is not None else {}).items():
            found[key // SEQUENCES_PER_REQUEST] = np.frombuffer(vector, np.float32)
    return _unit(np.stack([found[i] for i in range(len(texts))]))


def theirs(model: torch.nn.Module, tokenizer: Tokenizer, pooling: str, pad: int, texts: list[str]) -> np.ndarray:
    ids = [tokenizer.encode(text) for text in texts]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found: list[torch.Tensor] = [torch.empty(0)] * len(ids)
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        width = len(ids[some[0]])
        batch = torch.tensor([ids[i] + [pad] * (width - len(ids[i])) for i in some])
        mask = torch.tensor([[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in some])
        with torch.inference_mode():
            hidden = model(input_ids=batch, attention_mask=mask).last_hidden_state
        for i, row in zip(some, hidden):
            found[i] = pool_plainly(pooling, row[: len(ids[i])])
    return _unit(torch.stack(found).numpy())


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    texts, tokenizer = make_texts(args.texts), Tokenizer(args.model)
    loop = EngineLoop.create(settings_from_kwargs(
        model=str(args.model), runner="pooling", dtype="float32", num_threads=args.threads))
    torch.set_num_threads(args.threads)
    peer = transformers.AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    config = json.loads((args.model / "config.json").read_text())
    pooling = "mean"
    modules = args.model / "1_Pooling" / "config.json"
    if modules.is_file():
        modes = json.loads(modules.read_text())
        names = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "last"}
        pooling = next((mode for key, mode in names.items() if modes.get(key)), "mean")
    pad = config.get("pad_token_id") or 0
    runs = {"xllm-npu": lambda: ours(loop, tokenizer, texts),
            "transformers": lambda: theirs(peer, tokenizer, pooling, pad, texts)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    found = {}
    for _ in range(args.repeats + 1):  # the first of each warms up; in turns, as other work comes and goes
        for name, run in runs.items():
            began = time.perf_counter()
            found[name] = run()
            times[name].append(time.perf_counter() - began)
    loop.close()
    figures = {name: args.texts / statistics.median(seconds[1:]) for name, seconds in times.items()}
    figures["ratio"] = figures["xllm-npu"] / figures["transformers"]
    figures["largest difference"] = float(np.abs(found["xllm-npu"] - found["transformers"]).max())
    print(f"torch {torch.__version__}, transformers {version('transformers')}, Python {platform.python_version()}, "
          f"{config['architectures'][0]} with {config['hidden_size']} values, {args.texts} texts, "
          f"{args.threads} threads, fp32")
    for name in times:
        print(f"{name:<14} {figures[name]:8.1f} embeddings/s")
    print(f"ratio {figures['ratio']:.2f}, largest difference {figures['largest difference']:.1e}")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
