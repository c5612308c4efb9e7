"""What the parts of the device check share: arguments, the time budget, findings, timing.

A finding is one line of JSON after a mark, printed as soon as it is known, so that a part that dies later loses
nothing. `ok` says whether a check passed, `show` is what the table for people has of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dry_platform import DryPlatform
from xllm_platform.base import Platform
from xllm_platform.registry import select

MARK = "@ "


class Part:
    """The running part."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--platform", required=True)
        parser.add_argument("--seconds", type=float, required=True)
        parser.add_argument("--dry-run", action="store_true")
        args = parser.parse_args()
        self.platform_name, self.dry_run = args.platform, args.dry_run
        self._deadline = time.monotonic() + args.seconds
        self._copy_rate = 0.0

    def platform(self) -> Platform:
        """Selected and configured; device 0."""
        platform = DryPlatform() if self.dry_run else select(self.platform_name)
        platform.configure_process()
        platform.set_device(0)
        return platform

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def report(self, name: str, **values: Any) -> None:
        print(MARK + json.dumps({"name": name, **values}), flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """One finding: `ok` unless the block raises or sets it; skipped where it raises Skip."""
        values: dict[str, Any] = {"ok": True}
        began = time.monotonic()
        try:
            yield values
        except Skip as reason:
            self.report(name, skipped=str(reason), show=f"skipped: {reason}")
            return
        except Exception as error:
            traceback.print_exc()
            values |= {"ok": False, "detail": f"{type(error).__name__}: {error}"[:400]}
        self.report(name, **values, seconds=round(time.monotonic() - began, 2))

    def need(self, seconds: float) -> None:
        """Raises Skip if fewer are left."""
        if self.seconds_left < seconds:
            raise Skip(f"takes about {seconds:.0f} s, {max(self.seconds_left, 0):.0f} s are left")

    def median_ms(self, platform: Platform, run: Callable[[], object], seconds: float = 0.4) -> float:
        """Milliseconds of one call among many queued without waiting; a wait for the device before and after each
        round of calls.
        """
        for _ in range(3):
            run()
        platform.synchronize()
        began = time.perf_counter()
        run()
        platform.synchronize()
        once = time.perf_counter() - began
        calls = 1 if self.dry_run else max(1, min(200, int(seconds / 5 / max(once, 1e-6))))
        rounds = []
        for _ in range(3 if self.dry_run else 5):
            began = time.perf_counter()
            for _ in range(calls):
                run()
            platform.synchronize()
            rounds.append((time.perf_counter() - began) / calls * 1e3)
        return statistics.median(rounds)

    def copy_bytes_per_second(self, platform: Platform) -> float:
        """Bytes read and written a second by the largest plain copy: the ceiling of everything bound by memory."""
        if not self._copy_rate:
            count = 1 << 20 if self.dry_run else min(1 << 31, platform.memory_info().free // 8)
            source = torch.ones(count, dtype=torch.uint8, device=platform.device())
            target = torch.empty_like(source)
            self._copy_rate = 2 * count / (self.median_ms(platform, lambda: target.copy_(source)) / 1e3)
        return self._copy_rate


class Skip(Exception):
    """The next measurement is left out, and why: the part's time, the device's memory."""
