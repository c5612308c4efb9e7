"""The platform's own tests on this device: what every plugin promises, and what is this one's alone. A skip fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

from part import Part

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    part = Part()
    files = ["tests/xllm_platform/test_contract.py", "tests/xllm_platform/test_memory_driver_contract.py"]
    own = f"tests/xllm_platform/test_{part.platform_name}_device.py"
    if (ROOT / own).exists() and not part.dry_run:
        files.append(own)
    chosen = f"({part.platform_name} or not (cpu or npu or cuda))"
    if part.dry_run:
        chosen += " and not graph"  # the CPU compiles its graphs for half a minute
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.xml"
        # Options of pyproject.toml that plugins own are unknown where the plugin is not installed: a warning only.
        plugins = [] if importlib.util.find_spec("pytest_asyncio") else ["-W", "ignore::pytest.PytestConfigWarning"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", f"--junitxml={found}", *plugins,
             "-k", chosen, f"--timeout={part.seconds_left:.0f}"],
            cwd=ROOT, check=False)
        if not found.exists():
            raise SystemExit(f"pytest ended with code {done.returncode} and left no results")
        for case in xml.parse(found).getroot().iter("testcase"):
            failed = [child for child in case if child.tag in ("failure", "error", "skipped")]
            detail = (failed[0].get("message") or "")[:400] if failed else ""
            part.report(f"{case.get('name')}", ok=not failed, seconds=round(float(case.get("time", 0)), 2),
                        **({"detail": detail} if failed else {}))


if __name__ == "__main__":
    main()
