#!/usr/bin/env python3
"""Builds a directory of stand-in CANN libraries over which the installed torch_npu wheel imports.

    build.py --out build/npu-lab/cann [--zero-devices]      prints nothing when it is up to date

Reads the ELF files of torch_npu with `nm` and `readelf`: every strong undefined symbol that no library of torch, C or
C++ provides gets a stub that returns 0, unless one of the C files here defines it. Every library that is needed and
that this machine lacks becomes an empty one that depends on libascendcl.so, which holds all code. The C files are
compiled against the ACL headers of the wheel, so prototypes are checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
HOST_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2",
                  "ld-linux-aarch64.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
HOST_DIRECTORIES = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
                    "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
OPENED_BY_NAME = ("libatb.so", "libascend_hal.so", "libascend_dump.so", "libhcomm.so")  # dlopen, not DT_NEEDED
BASE = "libascendcl.so"
ZERO_DEVICES = "zero_devices.c"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--zero-devices", action="store_true", help="a CANN that sees no device")
    parser.add_argument("--cc", default=os.environ.get("CC", "gcc"))
    args = parser.parse_args()
    sources = [HERE / ZERO_DEVICES] if args.zero_devices else sorted(set(HERE.glob("*.c")) - {HERE / ZERO_DEVICES})
    build(args.out, sources, args.cc)
    return 0


def build(out: Path, sources: list[Path], cc: str) -> None:
    stamp, wanted = out / "built-from", _fingerprint(sources)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    torch, torch_npu = (Path(find_spec(name).submodule_search_locations[0]) for name in ("torch", "torch_npu"))
    undefined, missing = _wanted_by(torch, torch_npu)
    with tempfile.TemporaryDirectory() as directory:
        objects = [_compile(cc, source, Path(directory), torch_npu / "include") for source in sources]
        defined = {name for one in objects for name in _symbols(one, "--defined-only", "-g")}
        stubs = Path(directory) / "stubs.c"
        stubs.write_text("".join(f'long stub_{i}(void) __asm__("{name}"); long stub_{i}(void) {{ return 0; }}\n'
                                 for i, name in enumerate(sorted(undefined - defined))))
        _run(cc, "-shared", "-fPIC", f"-Wl,-soname,{BASE}", "-o", out / BASE, stubs, *objects,
             "-lpthread", "-ldl", "-lrt", "-lm")
        empty = Path(directory) / "empty.c"
        empty.write_text("")
        for name in sorted(missing.union(OPENED_BY_NAME) - {BASE}):
            _run(cc, "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN",
                 "-o", out / name, empty, out / BASE)
    report = {"implemented": sorted(undefined & defined), "stubbed": sorted(undefined - defined)}
    (out / "report.json").write_text(json.dumps(report, indent=1))
    stamp.write_text(wanted)
    print(f"{out}: {len(undefined)} symbols of CANN, {len(undefined & defined)} implemented, the others do nothing",
          file=sys.stderr)


def _fingerprint(sources: list[Path]) -> str:
    """Of everything the libraries depend on."""
    digest = hashlib.sha256(f"{version('torch')} {version('torch_npu')} {sys.platform}".encode())
    for path in (Path(__file__), *sorted(HERE.glob("*.h")), *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _wanted_by(torch: Path, torch_npu: Path) -> tuple[set[str], set[str]]:
    """Symbols that nobody provides, and libraries that are nowhere."""
    objects = sorted([*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")])
    hosts = [path for path in map(_host_library, HOST_LIBRARIES) if path]
    libraries = [*objects, *torch.glob("lib/*.so*"), *hosts]
    provided = {name for path in libraries for name in _symbols(path, "-D", "--defined-only")}
    undefined, missing = set(), set()
    for path in objects:
        strong = {name for name, kind in _symbols(path, "-D", "--undefined-only").items() if kind == "U"}
        undefined |= {name for name in strong - provided if not name.startswith(("Py", "_Py"))}
        missing |= {name for name in _needed(path) if not _host_library(name) and not (torch / "lib" / name).exists()
                    and not (torch_npu / "lib" / name).exists()}
    return undefined, missing


def _compile(cc: str, source: Path, directory: Path, include: Path) -> Path:
    target = directory / f"{source.stem}.o"
    _run(cc, "-O1", "-g", "-fPIC", "-std=gnu2x", "-Wall", "-Werror=incompatible-pointer-types",
         "-Werror=implicit-function-declaration", "-I", include, "-c", source, "-o", target)
    return target


def _symbols(path: Path, *options: str) -> dict[str, str]:
    """{name: kind} as nm has them."""
    lines = _run("nm", "--without-symbol-versions", *options, path).splitlines()
    return {parts[-1]: parts[-2] for parts in map(str.split, lines) if len(parts) >= 2}


def _needed(path: Path) -> list[str]:
    lines = _run("readelf", "-d", path).splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


def _host_library(name: str) -> Path | None:
    return next((path for path in (Path(directory, name) for directory in HOST_DIRECTORIES) if path.exists()), None)


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"There is no {command[0]} here: install gcc and binutils, or name a C compiler with CC.")
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
