"""What devices this machine offers: `python -m xllm_npu.execution.device_probe PLATFORM` prints one JSON object.

A process of its own, because asking some devices takes them, and because the processes that ask run for as long as the
server and should hold neither torch nor a device. `probe` asks from there.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

TIMEOUT_SECONDS = 120.0


class ProbeError(RuntimeError):
    """No device can be used; the message says why."""


class DeviceReport(msgspec.Struct, kw_only=True):
    platform: str
    count: int
    shared: bool  # any number of ranks may be put on one device
    error: str = ""  # for people; then nothing else is set


def probe(platform: str) -> DeviceReport:
    """Blocks for as long as a Python process with the platform's libraries takes. Raises ProbeError."""
    command = [sys.executable, "-m", "xllm_npu.execution.device_probe", platform]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS,
                              check=False)
        report = msgspec.json.decode(done.stdout.splitlines()[-1], type=DeviceReport)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"The devices of platform {platform} did not answer within {TIMEOUT_SECONDS:.0f} s.") from None
    except (IndexError, msgspec.MsgspecError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProbeError(f"The devices of platform {platform} cannot be asked: {(words or ['no reason given'])[-1]}"
                         ) from None
    if report.error:
        raise ProbeError(report.error)
    return report


def main() -> int:
    from xllm_platform.base import PlatformError
    from xllm_platform.registry import select

    try:
        found = select(sys.argv[1])
        shared = found.capabilities.shared_memory
        report = DeviceReport(platform=found.name, count=found.device_count(), shared=shared)
    except PlatformError as error:
        report = DeviceReport(platform="", count=0, shared=False, error=str(error))
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
