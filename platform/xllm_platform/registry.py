"""Which platforms exist, which of them can be used here, and which one to use.

Built-in plugins come from a table, third-party ones from the entry-point group `xllm_npu.platforms` (entry
point name: the platform's name; value: `module:Class`). A built-in name cannot be taken over by a third
party. Nothing here imports a plugin before it is asked about, and a plugin that cannot be imported is
reported like one whose device is absent. Does not know models, and does not configure the device it selects.
"""

from __future__ import annotations

import difflib
import importlib
import os
from importlib.metadata import EntryPoint, entry_points

from xllm_platform.base import Availability, Platform, PlatformError

ENTRY_POINT_GROUP = "xllm_npu.platforms"

BUILT_IN = {
    "npu": "xllm_platform.npu.device:NpuPlatform",
    "cuda": "xllm_platform.cuda.device:CudaPlatform",
    "cpu": "xllm_platform.cpu.device:CpuPlatform",
}


def known_platforms() -> dict[str, str]:
    """{name: 'module:Class'} in the order `auto` tries them: npu, cuda, third parties by name, cpu."""
    found = sorted(_entry_points(), key=lambda point: point.name)
    third_party = {point.name: point.value for point in found if point.name not in BUILT_IN}
    known = {name: BUILT_IN[name] for name in ("npu", "cuda")}
    known.update(third_party)
    known["cpu"] = BUILT_IN["cpu"]
    return known


def load(name: str) -> type[Platform]:
    """The plugin's class. Raises PlatformError if the name is unknown or the plugin cannot be imported."""
    known = known_platforms()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise PlatformError(f"There is no platform {name!r}; choose auto or one of {', '.join(known)}.{hint}")
    module_name, _, class_name = known[name].partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, OSError) as error:
        raise PlatformError(f"platform {name} ({known[name]}) cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Platform)):
        raise PlatformError(
            f"platform {name} ({known[name]}) is not a subclass of xllm_platform.base.Platform"
        )
    return found


def probe(name: str) -> Availability:
    """Whether one platform can be used here. Never raises for a known name, whatever its plugin does.

    From now on torch, if it is not loaded yet, loads no vendor's extension by itself: one that is installed and cannot
    be loaded (torch_npu without CANN) would take every other platform down with it. Plugins load their own.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        return load(name).probe()
    except PlatformError as error:
        return Availability(False, str(error))
    except Exception as error:  # a third party's probe broke its contract; that must not stop the others
        return Availability(False, f"its probe failed with {type(error).__name__}: {error}")


def probe_all() -> dict[str, Availability]:
    """Every known platform, in the order `auto` tries them."""
    return {name: probe(name) for name in known_platforms()}


def select(name: str = "auto") -> Platform:
    """The platform `name`, or for `auto` the first usable one. Raises PlatformError with each probe's
    reason."""
    if name != "auto":
        plugin = load(name)
        available = probe(name)
        if not available.ok:
            raise PlatformError(f"platform {name} cannot be used here: {available.reason}")
        return plugin()
    reasons = []
    for candidate in known_platforms():
        available = probe(candidate)
        if available.ok:
            return load(candidate)()
        reasons.append(f"{candidate}: {available.reason}")
    raise PlatformError("No platform can be used here. " + "; ".join(reasons))


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))
