"""Code from outside this repository: entry points of the group `xllm_npu.plugins`.

Each names a function without parameters ("module:function") that is called once, before the model is loaded; it may
call `register_model`, `register_policy`, `register_ops`, `register_attention`. Platforms have a group of their own
(`xllm_npu.platforms`).
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points

log = logging.getLogger(__name__)

GROUP = "xllm_npu.plugins"


class PluginError(RuntimeError):
    """An installed plugin cannot be loaded; the message names it."""


@cache
def load_plugins() -> tuple[str, ...]:
    """Call every plugin, once in this process; their names. Raises PluginError."""
    names = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        try:
            point.load()()
        except Exception as error:
            message = f"The plugin {point.name} ({point.value}) failed: {error}. Repair or uninstall it."
            raise PluginError(message) from error
        log.info("plugin %s", point.name)
        names.append(point.name)
    return tuple(names)
