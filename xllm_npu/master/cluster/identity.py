"""What one machine says about itself when it joins, and whether that fits what another one is.

Settings that only concern one machine (where its copy of the model lies, its threads) may differ; the others may not,
because every rank computes a part of the same step. Reads the model's configuration file and nothing else of it.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xllm_npu.config.names import flag
from xllm_npu.config.settings import Settings, setting_fields
from xllm_npu.execution.device_probe import DeviceReport
from xllm_npu.master.cluster.messages import Identity
from xllm_npu.version import __version__

COMMON_SECTIONS = ("model", "kv_cache", "scheduler", "execution", "profile", "parallel")
# Every machine has its own; children that the master asks for are started with these.
OWN_SETTINGS = (
    "model", "tokenizer", "chat_template", "download_dir", "use_modelscope", "platform", "device_id", "num_threads",
)  # fmt: skip
_HEAD_BYTES = 2**20  # of a .gguf file: all of its metadata, or most of it


def identify(settings: Settings, devices: DeviceReport) -> Identity:
    first = max(settings.execution.device_id, 0)
    return Identity(
        version=__version__, torch=_torch_version(), platform=devices.platform,
        devices=[0] if devices.shared else list(range(first, devices.count)), shares_devices=devices.shared,
        nnodes=settings.distributed.nnodes, model=model_fingerprint(settings), settings=common_settings(settings),
    )


def common_settings(settings: Settings) -> dict[str, str]:
    return {
        name: str(getattr(getattr(settings, field.section), name))
        for name, field in setting_fields().items()
        if field.section in COMMON_SECTIONS and name not in OWN_SETTINGS
    }


def model_fingerprint(settings: Settings) -> str:
    """Equal on two machines that have the same model, wherever it lies there. A hub id stands for itself."""
    path = Path(settings.model.model).expanduser()
    if (path / "config.json").is_file():
        text = (path / "config.json").read_text(encoding="utf-8")
        canonical = json.dumps(json.loads(text), sort_keys=True)
        return "config.json " + hashlib.sha256(canonical.encode()).hexdigest()[:16]
    if path.is_file():
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(_HEAD_BYTES))
        return f"file of {path.stat().st_size} bytes " + digest.hexdigest()[:16]
    return f"{settings.model.model}@{settings.model.revision or 'main'}"


def mismatch(master: Identity, agent: Identity, node: int) -> str | None:
    """One sentence on the first thing that does not fit, or None."""
    this = f"node {node}"
    if agent.version != master.version:
        return f"{this} runs xllm-npu {agent.version} and node 0 runs {master.version}: install the same version."
    if agent.torch != master.torch:
        return f"{this} has torch {agent.torch} and node 0 has {master.torch}: install the same version."
    if agent.platform != master.platform:
        return (f"{this} computes on platform {agent.platform} and node 0 on {master.platform}: "
                "give every machine the same --platform.")
    if agent.nnodes != master.nnodes:
        return f"{this} has --nnodes={agent.nnodes} and node 0 has --nnodes={master.nnodes}: give both the same."
    if agent.model != master.model:
        return f"{this} has another model than node 0 ({agent.model}, not {master.model}): give both the same."
    for name, value in master.settings.items():
        other = agent.settings.get(name, "")
        if other != value:
            return f"{this} has {flag(name)}={other} and node 0 has {flag(name)}={value}: give both the same."
    return None


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"
