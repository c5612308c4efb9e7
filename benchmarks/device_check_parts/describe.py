"""Prints one JSON object: the device of the platform named on the command line, and the versions that matter."""

from __future__ import annotations

import importlib.metadata
import json
import sys

PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "msgspec", "fastapi")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(platform_name: str) -> None:
    from xllm_platform.registry import select

    platform = select(platform_name)
    platform.set_device(0)
    import torch

    memory, capabilities = platform.memory_info(), platform.capabilities
    print(json.dumps({
        "device": platform.device_name(), "platform": platform.name, "memory_bytes": memory.total,
        "free_bytes": memory.free, "toolkit": torch.version.cuda, "versions": versions(),
        "attention_backends": list(capabilities.attention_backends), "kernels": capabilities.kernels,
    }))


if __name__ == "__main__":
    main(sys.argv[1])
