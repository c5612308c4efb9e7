"""Expert load balancing: how even the ranks become under a skewed load, and what a step costs while experts move.

Real processes over gloo, each with its part of a stack of sparse MLPs and nothing else, so that nothing hides what
moving costs. Tokens like the experts of the first ranks best: those of rank r are chosen with a preference that falls
with their number. The same steps run without balancing first; outputs must be the same.

    python benchmarks/expert_balance.py [--json] [--ranks 2] [--steps 400] [--experts 64] [--all-to-all]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from xllm_models.backends import get_ops
from xllm_models.config import ModelConfig
from xllm_models.layers.moe import SparseMoe, StepTokens
from xllm_platform.collectives import barrier
from xllm_platform.parallel import ExpertExchange, ParallelInit, ParallelState

from xllm_npu.execution.expert_balancer import ExpertBalancer

LAYERS, HIDDEN, WIDTH, TOP = 4, 512, 256, 8
COMPARED = 8  # every so-manieth step's output is kept


def config_of(experts: int) -> ModelConfig:
    return ModelConfig.from_dict({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "norm_topk_prob": True,
        "max_position_embeddings": 64, "num_experts": experts, "num_experts_per_tok": TOP,
        "moe_intermediate_size": WIDTH,
    })


def build(config: ModelConfig, parallel: ParallelState) -> torch.nn.ModuleList:
    """Layers whose matrices depend on the layer and the expert only, so that every layout has the same model."""
    assert config.moe is not None
    experts, device = config.moe.num_experts, torch.device("cpu")
    layers = torch.nn.ModuleList()
    for index in range(LAYERS):
        layer = SparseMoe(config, index, parallel, ops=get_ops("cpu"), dtype=torch.float32, device=device,
                          step=StepTokens())
        generator = torch.Generator().manual_seed(index)
        router = torch.randn(experts, HIDDEN, generator=generator) * 0.5 / HIDDEN**0.5
        router[:, 0] = 2.5 / (1 + torch.arange(experts)) ** 0.3  # the first number of every token is 1
        layer.router.linear.weight.data.copy_(router)
        for local in range(experts // parallel.ep.size):
            generator.manual_seed(1000 * index + layer.experts.sharding.first + local)
            for matrix in layer.experts.matrices():
                matrix[local] = torch.randn(matrix.shape[1:], generator=generator) / matrix.shape[2] ** 0.5
        layers.append(layer)
    return layers


class RankCounts:
    """How many visits each rank's experts really had."""

    def __init__(self, layers: torch.nn.ModuleList, ranks: int) -> None:
        self.visits = np.zeros((len(layers), ranks))
        for index, layer in enumerate(layers):
            layer.place = self._counting(layer.place, index, layer.experts.slots)  # type: ignore[union-attr]

    def _counting(self, place: Any, index: int, slots: int) -> Any:
        def counted(ids: torch.Tensor) -> torch.Tensor:
            places = place(ids)
            ranks = (places[places >= 0] // slots).numpy()
            self.visits[index] += np.bincount(ranks, minlength=self.visits.shape[1])
            return places

        return counted

    def busiest(self) -> float:
        """The busiest rank's visits over the mean, the mean of all layers; counting starts anew."""
        share = (self.visits.max(axis=1) / self.visits.mean(axis=1)).mean()
        self.visits[:] = 0
        return float(share)


def run(parallel: ParallelState, args: argparse.Namespace) -> dict[str, Any]:
    layers = build(config_of(args.experts), parallel)
    interval = args.steps // 8
    counts = RankCounts(layers, parallel.ep.size)
    balancer = ExpertBalancer(layers, parallel, interval, 0.9) if parallel.experts.balanced else None
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # wall, this rank's CPU
    kept, before = [], 0.0
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        hidden = torch.randn(args.rows, HIDDEN, generator=generator)
        hidden[:, 0] = 1
        moving = balancer is not None and balancer.moving
        barrier(parallel.world)
        began, cpu = time.perf_counter(), time.process_time()
        out = torch.stack([layer(hidden) for layer in layers])
        if balancer is not None:
            balancer.after_step()
        seconds[moving].append((time.perf_counter() - began, time.process_time() - cpu))
        if step % COMPARED == 0:
            kept.append(out)
        if step == interval - 1:
            before = counts.busiest()
        if step == 6 * interval or (step > 6 * interval and moving):
            counts.busiest()  # what counts is what follows, when all experts have come
    updates = 0 if balancer is None else balancer.updates
    return {"outputs": torch.stack(kept), "before": before, "after": counts.busiest(), "seconds": seconds,
            "updates": updates}


def rank_main(rank: int, args: argparse.Namespace, directory: str, answers: Any) -> None:
    torch.set_num_threads(args.threads)
    found = []
    for balanced in (False, True):
        exchange = ExpertExchange(args.all_to_all, balanced, args.redundant if balanced else 0)
        parallel = ParallelState.initialize(ParallelInit(
            rank=rank, world_size=args.ranks, init_method=f"file://{directory}/meet-{balanced}", tp_size=args.ranks,
            ep_size=args.ranks, experts=exchange), "gloo")
        with torch.inference_mode():
            found.append(run(parallel, args))
        parallel.shutdown()
    plain, balanced_run = found
    difference = float((plain["outputs"] - balanced_run["outputs"]).abs().max())
    times = balanced_run["seconds"]

    def median_ms(moving: bool, which: int) -> float:
        return 1e3 * statistics.median([pair[which] for pair in times[moving]] or [0.0])

    answers.put((rank, {
        "difference": difference, "before": balanced_run["before"], "after": balanced_run["after"],
        "unbalanced": plain["after"], "updates": balanced_run["updates"],
        "normal_ms": median_ms(False, 0), "moving_ms": median_ms(True, 0),
        "normal_cpu_ms": median_ms(False, 1), "moving_cpu_ms": median_ms(True, 1), "moving_steps": len(times[True]),
    }))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [context.Process(target=rank_main, args=(r, args, directory, answers), daemon=True)
                     for r in range(args.ranks)]
        for process in processes:
            process.start()
        try:
            found = dict(answers.get(timeout=900) for _ in processes)
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()
    slowest = max(found.values(), key=lambda row: row["moving_ms"] / row["normal_ms"])
    return {**slowest, "difference": max(row["difference"] for row in found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=64, help="tokens a step")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--redundant", type=int, default=1, help="spare places a rank")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--all-to-all", action="store_true", help="send rows to their experts' ranks only")
    args = parser.parse_args()
    row = measure(args)
    print(f"{args.ranks} ranks over gloo on {os.cpu_count()} cores, {args.threads} thread(s) each, "
          f"torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{LAYERS} layers, {args.experts} experts of {HIDDEN} x {WIDTH}, {TOP} a token, "
          f"{args.redundant} spare places a rank, {args.rows} tokens a step, {args.steps} steps")
    print(f"busiest rank over the mean   without balancing {row['unbalanced']:.3f}   before {row['before']:.3f}   "
          f"after {row['after']:.3f}")
    print(f"step, median ms              normal {row['normal_ms']:.2f}   while experts move {row['moving_ms']:.2f}   "
          f"({row['moving_ms'] / row['normal_ms']:.2f} times, {row['moving_steps']} steps)")
    print(f"CPU of one rank, median ms   normal {row['normal_cpu_ms']:.2f}   while experts move "
          f"{row['moving_cpu_ms']:.2f}   ({row['moving_cpu_ms'] / row['normal_cpu_ms']:.2f} times)")
    print(f"placements changed {row['updates']}, largest difference of any output {row['difference']:.1e}")
    if args.json:
        print(json.dumps({"benchmark": "expert_balance", "ranks": args.ranks, **row}))


if __name__ == "__main__":
    main()
