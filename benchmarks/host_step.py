"""The host's time for one decode step: schedule, build inputs, process outputs. Model and sampling are ready tokens.

What is measured is what stands between two steps of the device in the engine process, with every feature on: stop
rules (EOS, stop ids, length), prefix cache, block growth, streaming (the step's outputs encoded for the HTTP
process), the step message made for the worker and the worker's own buffers filled from it. Detokenizing happens in
the HTTP process, beside the device; its time for the same step is printed on a line of its own.

With `--tp N`, N - 1 worker processes get the same steps through the channel that serving uses. A step's device work
can begin when the slowest rank has filled its buffers, so the time counts until then: encoding, the message's way,
decoding. One rank alone takes turns with them, and the difference is printed.

    python benchmarks/host_step.py [--json] [--steps 400] [--sizes 64,128,256] [--tp 2]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import shutil
import statistics
import tempfile
import time
from ctypes import Array

import msgspec
import numpy as np
import torch
from xllm_models.hub import DEFAULT_MODEL, list_pulled

from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.shm_ring import RingReader, RingWriter
from xllm_npu.execution.step_channel import StepReceiver, StepSender
from xllm_npu.execution.step_message import StepInput, build_step_input
from xllm_npu.execution.worker_messages import WorkerStop
from xllm_npu.master.output_dispatcher import OutputDispatcher
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.batch import StepResult
from xllm_npu.state.messages import AddRequest, StepOutputs, sequence_key
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.text.tokenizer import Tokenizer

BLOCK, CONTEXT, PROMPT = 128, 2048, 192
PEERS = "nano-vllm 145 / 250 / 470 us, mini-sglang 1,200 / 2,400 / 4,500, vLLM 0.32 2,700 / 4,800 / 9,600"
TURN = 20  # steps of one kind in a row, where two kinds are compared
PARTS = ("schedule", "message", "build", "process", "encode")
MIB = 2**20


def follow(endpoint: str, ring: tuple[int, int, int], times: Array[float]) -> None:
    """A worker process: fills its buffers from each step and says when it was done (time.perf_counter)."""
    torch.set_num_threads(1)
    receiver = StepReceiver(endpoint, RingReader(*ring))
    builder = make_builder(1024)
    gc.disable()
    while isinstance(step := receiver.receive(), StepInput):
        built = builder.build(step)
        done = time.perf_counter()
        builder.remember(built.sample_rows, torch.zeros(built.sample_rows.size, dtype=torch.int64))
        times[1] = done
        times[0] += 1  # last: the time is there when the count is
    receiver.close()


class Followers:
    """The other ranks of an engine with `tp` of them."""

    def __init__(self, tp: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="xllm-npu-")
        endpoint = f"ipc://{self._directory}/steps"
        ring = RingWriter(64 * MIB, tp - 1)
        self.sender = StepSender([endpoint], ring, far=False)
        self._processes, self._times = [], []
        context = multiprocessing.get_context("fork")
        for index, bell in enumerate(ring.bells):
            place = ring.fd, bell, index
            times = context.RawArray("d", 2)  # steps done, when the last was: nobody sleeps for it, as on a device
            process = context.Process(target=follow, args=(endpoint, place, times), daemon=True)
            process.start()
            self._processes.append(process)
            self._times.append(times)
        self._steps = 0
        heard = 0
        while heard < tp - 1:
            heard += self.sender.heard(1000)

    def done(self) -> float:
        """When the slowest had filled its buffers."""
        self._steps += 1
        for times in self._times:
            while times[0] < self._steps:
                pass
        return max(times[1] for times in self._times)

    def close(self) -> None:
        self.sender.send(WorkerStop())
        for process in self._processes:
            process.join()
        self.sender.close()
        shutil.rmtree(self._directory)


def make_builder(num_seqs: int) -> InputBuilder:
    return InputBuilder(max_tokens=65536, max_rows=num_seqs, max_blocks=CONTEXT // BLOCK, block_size=BLOCK,
                        device=torch.device("cpu"), pinned=False)


class HostStep:
    """An engine whose worker answers at once with ready tokens."""

    def __init__(self, num_seqs: int, steps: int, followers: Followers | None = None) -> None:
        blocks = num_seqs * (CONTEXT // BLOCK) + 1
        self.scheduler = Scheduler(SchedulerOptions(
            max_seqs=num_seqs, max_tokens=65536, max_model_len=CONTEXT, num_blocks=blocks, block_size=BLOCK,
            eos_token_ids=(2,)))
        self.builder = make_builder(num_seqs)
        self.followers = followers
        self.encoder = msgspec.msgpack.Encoder()
        rng = np.random.default_rng(0)
        for i in range(num_seqs):
            params = SamplingParams(temperature=0.0, max_tokens=steps + 400, stop_token_ids=(7, 11, 13), stop=("\n\n",))
            prompt = rng.integers(20, 40000, PROMPT - i % 64).astype(np.int32)
            self.scheduler.add(AddRequest(request_id=i, external_id=str(i), prompt=prompt.tobytes(), params=params,
                                          arrival_time=time.time()))
        self.tokens = rng.integers(20, 40000, num_seqs).astype(np.int32)

        self.in_flight: list[StepResult] = []

    def step(self) -> tuple[int, list[float]]:
        """(sequences, seconds of each of PARTS), overlapped: a step is scheduled before the one before is processed."""
        t0 = time.perf_counter()
        group = self.scheduler.schedule()
        assert group is not None
        batch = group.batches[0]
        t1 = time.perf_counter()
        message = build_step_input(batch, group.tables[0], BLOCK)
        if self.followers is not None:
            self.followers.sender.send(message)
        t2 = time.perf_counter()
        built = self.builder.build(message)
        t3 = time.perf_counter()
        if self.followers is not None:
            t3 = max(t3, self.followers.done())
        count = built.sample_rows.size
        result = StepResult(step_id=message.step_id, tokens=self.tokens[:count].tobytes(), seconds=0.01)
        self.builder.remember(built.sample_rows, torch.from_numpy(self.tokens[:count].astype(np.int64)))
        self.in_flight.append(result)
        if len(self.in_flight) < 2:
            return 0, []
        t4 = time.perf_counter()
        outputs = self.scheduler.process(self.in_flight.pop(0))
        t5 = time.perf_counter()
        self.encoder.encode(outputs)
        t6 = time.perf_counter()
        return batch.num_decodes, [t1 - t0, t2 - t1, t3 - t2, t5 - t4, t6 - t5]


def measure(num_seqs: int, steps: int, tp: int) -> dict[str, float]:
    """The step with `tp` ranks, and if these are several, what one rank takes in turn with them ("alone")."""
    followers = Followers(tp) if tp > 1 else None
    # The clock of a machine drifts: taking turns, both see all of its moods.
    hosts = [HostStep(num_seqs, steps, followers)] + ([HostStep(num_seqs, steps)] if followers is not None else [])
    rows: list[list[list[float]]] = [[] for _ in hosts]
    while len(rows[0]) < steps:
        for host, found in zip(hosts, rows):
            wanted = len(found) + TURN
            while len(found) < wanted:
                decodes, seconds = host.step()
                if decodes == num_seqs:
                    found.append(seconds)
    if followers is not None:
        followers.close()
    own, *alone = [found[len(found) // 4 :] for found in rows]
    total = sorted(sum(r) for r in own)
    parts = {name: statistics.median(r[i] for r in own) * 1e6 for i, name in enumerate(PARTS)}
    row = {"us": statistics.median(total) * 1e6, "p90": total[int(len(total) * 0.9)] * 1e6, **parts}
    if alone:
        row["alone"] = statistics.median(sum(r) for r in alone[0]) * 1e6
        turns = zip(*(_medians_by_turn(found) for found in (own, alone[0])))
        row["above"] = statistics.median(with_ranks - one for with_ranks, one in turns) * 1e6
    return row


def _medians_by_turn(rows: list[list[float]]) -> list[float]:
    return [statistics.median(map(sum, rows[i : i + TURN])) for i in range(0, len(rows), TURN)]


def measure_text(num_seqs: int, steps: int) -> float | None:
    """Microseconds of the HTTP process for one step's tokens: detokenize, watch for stop strings, hand to streams.

    With the default model's tokenizer; None if that has not been pulled.
    """
    pulled = [model for model in list_pulled() if model.name == DEFAULT_MODEL]
    if not pulled:
        return None
    dispatcher = OutputDispatcher(Tokenizer(pulled[0].path), lambda message: None)
    params = SamplingParams(max_tokens=10**6, stop=("\n\n",))
    for i in range(num_seqs):
        prompt = np.arange(20, 40, dtype=np.int32).tobytes()
        request = AddRequest(request_id=i, external_id=str(i), prompt=prompt, params=params, arrival_time=0.0)
        dispatcher.open(request, lambda output: None, stream=True)
    keys = np.array([sequence_key(i, 0) for i in range(num_seqs)], np.int64).tobytes()
    rng, seconds = np.random.default_rng(0), []
    for _ in range(steps):
        tokens = rng.integers(300, 20000, num_seqs).astype(np.int32).tobytes()
        began = time.perf_counter()
        dispatcher.handle(StepOutputs(keys=keys, tokens=tokens))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[len(seconds) // 4 :]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line: {size: microseconds}")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--tp", type=int, default=1, help="ranks; all but the first in processes of their own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    found = {size: measure(size, args.steps, args.tp) for size in map(int, args.sizes.split(","))}
    print(f"host time of one decode step, microseconds, median of {args.steps} steps "
          f"(Python {platform.python_version()}, numpy {np.__version__}, block size {BLOCK}, tp {args.tp})")
    print(f"{'sequences':>10}{'total':>8}{'p90':>8}" + "".join(f"{name:>10}" for name in PARTS))
    for size, row in found.items():
        print(f"{size:>10}{row['us']:>8.0f}{row['p90']:>8.0f}" + "".join(f"{row[name]:>10.0f}" for name in PARTS))
    for size, row in found.items():
        if "above" in row:
            print(f"{size}: {row['above']:.0f} us above one rank, which in turn with it took {row['alone']:.0f} "
                  f"(median of the differences, {TURN} steps a turn)")
    text = {size: measure_text(size, args.steps) for size in found}
    if None in text.values():
        print(f"HTTP process: not measured, it needs the tokenizer of {DEFAULT_MODEL} (xllm-npu pull)")
    else:
        print("HTTP process, detokenize and dispatch the same step: "
              + ", ".join(f"{us:.0f} us at {size}" for size, us in text.items()))
    print(f"peers at 64 / 128 / 256, measured on two such cores: {PEERS}")
    if args.json:
        print(json.dumps({str(size): round(row["us"], 1) for size, row in found.items()}))


if __name__ == "__main__":
    main()
