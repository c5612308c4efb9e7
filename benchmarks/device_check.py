"""What only a machine with the device can show, in one run of under eight minutes: correctness first, then speed.

    make device-check PYTHON=python3                  # or: python3 benchmarks/device_check.py
    python3 benchmarks/device_check.py --dry-run      # everything on the CPU with tiny shapes; its times mean nothing

Parts, each a process of its own with its own time budget (`device_check_parts/`): contract (the platform's tests),
kernels (numbers against torch, time against a copy), greedy (tokens of tiny checkpoints against the CPU platform),
engine (the same through the whole engine), decode (a 1B- and an 8B-shaped model with random weights against the memory
roofline and transformers), serving (HTTP, 64 clients). A part that fails, hangs or needs a package that is not here
takes nothing from the others, and what it had found until then is kept.

Needs torch, triton, transformers and pytest; engine and serving need what pyproject.toml lists. Nothing is installed or
downloaded. Packages in a folder of your own are found through PYTHONPATH. Writes one JSON, prints a table, and exits
with 1 if anything that was run gave a wrong answer or did not end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GRACE = 5.0  # seconds beyond its budget after which a part counts as hanging
MARK = "@ "  # what a part prints before a finding; everything else it prints is for people


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: float  # at most; the whole run is bounded too
    needs: tuple[str, ...] = ()  # modules without which it is skipped


ENGINE_NEEDS = ("msgspec", "pydantic", "pydantic_settings", "zmq")
SERVER_NEEDS = (*ENGINE_NEEDS, "fastapi", "uvicorn", "httptools", "uvloop", "prometheus_client")
PARTS = (
    Part("contract", 45, ("pytest", "pytest_timeout")),
    Part("kernels", 100, ("triton",)),
    Part("greedy", 90),
    Part("engine", 75, ENGINE_NEEDS),
    Part("decode", 150, ()),
    Part("serving", 90, SERVER_NEEDS),
)


def environment() -> dict[str, str]:
    """Of the parts: this repository's source roots before whatever PYTHONPATH names."""
    roots = [str(ROOT), *(str(ROOT / part) for part in ("platform", "kernels_npu", "models")), str(HERE)]
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def missing(modules: tuple[str, ...]) -> list[str]:
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    done = subprocess.run([sys.executable, "-c", code, *modules], env=environment(), capture_output=True, text=True,
                          check=True)
    return done.stdout.split()


def run_part(part: Part, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """status: passed, failed, timeout or skipped; findings: what the part reported, in order."""
    lacking = missing(part.needs)
    if lacking:
        return {"status": "skipped", "seconds": 0.0, "findings": [], "reason": f"not installed: {', '.join(lacking)}"}
    script = HERE / "device_check_parts" / f"check_{part.name}.py"
    command = [sys.executable, "-u", str(script), "--platform", args.platform, "--seconds",
               f"{seconds:.0f}", *(["--dry-run"] if args.dry_run else [])]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=err, start_new_session=True)  # fmt: skip
        try:
            code: int | None = process.wait(seconds * 1.15 + GRACE)  # it watches its budget itself; this is for hangs
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process)
        out.seek(0)
        err.seek(0)
        printed, errors = out.read(), err.read()
    findings = [json.loads(line[len(MARK):]) for line in printed.splitlines() if line.startswith(MARK)]
    wrong = code != 0 or any(not finding.get("ok", True) for finding in findings)
    result = {"status": "timeout" if code is None else "failed" if wrong else "passed",
              "seconds": round(time.monotonic() - began, 1), "findings": findings}
    if result["status"] != "passed":
        rest = [line for line in printed.splitlines() if not line.startswith(MARK)]
        result["reason"] = "\n".join([*rest, *errors.splitlines()][-40:])
    return result


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The part and every process it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def describe(platform: str) -> dict[str, Any]:
    """Versions and the card, asked in a process of its own: this one never loads torch."""
    code = (HERE / "device_check_parts" / "describe.py").as_posix()
    done = subprocess.run([sys.executable, code, platform], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The device check cannot run here: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(report: dict[str, Any]) -> list[str]:
    """The table for people."""
    lines = [f"{report['device']}, {report['date']}" + (" (dry run: times mean nothing)" if report["dry_run"] else "")]
    for name, part in report["parts"].items():
        checks = [f for f in part["findings"] if "ok" in f]
        passed = sum(f["ok"] for f in checks)
        note = part.get("reason", "").splitlines()[-1:] if part["status"] in ("skipped", "timeout", "failed") else []
        lines.append(f"{name:9} {part['status']:8} {part['seconds']:6.1f} s  {passed}/{len(checks)} checks"
                     + "".join(f"  {line[:100]}" for line in note))
        for finding in part["findings"]:
            if not finding.get("ok", True) or "show" in finding:
                mark = " " if finding.get("ok", True) else "!"
                lines.append(f"  {mark} {finding['name']:44} {finding.get('show') or finding.get('detail', '')}"[:118])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="", help="cuda (the default), npu, ...; a dry run is on cpu")
    parser.add_argument("--dry-run", action="store_true", help="all of it on the CPU with tiny shapes")
    parser.add_argument("--only", default="", help="comma-separated names of parts")
    parser.add_argument("--minutes", type=float, default=7.75, help="of the whole run")
    parser.add_argument("--output", type=Path, help="folder of the JSON; a dry run writes none without it")
    args = parser.parse_args()
    args.platform = args.platform or ("cpu" if args.dry_run else "cuda")
    chosen = [part for part in PARTS if not args.only or part.name in args.only.split(",")]
    if not chosen:
        parser.error(f"--only takes names of parts: {', '.join(part.name for part in PARTS)}")
    deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {
        "benchmark": "device_check", "date": datetime.date.today().isoformat(), "dry_run": args.dry_run,
        "command": shlex.join(["python3", "benchmarks/device_check.py", *sys.argv[1:]]), **describe(args.platform),
        "parts": {}}
    for number, part in enumerate(chosen):
        left = deadline - time.monotonic()
        later = sum(p.seconds for p in chosen[number + 1 :])
        seconds = min(part.seconds, max(10.0, left - later * left / (later + part.seconds)))
        print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        report["parts"][part.name] = run_part(part, args, seconds)
    folder = args.output or (None if args.dry_run else HERE / "results")
    if folder is not None:
        card = re.sub(r"[^a-z0-9]+", "-", report["device"].lower()).strip("-")
        path = folder / f"device-check-{card}-{report['date']}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(f"wrote {path}", file=sys.stderr)
    print("\n".join(summary(report)))
    return int(any(part["status"] in ("failed", "timeout") for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
