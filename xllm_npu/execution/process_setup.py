"""What a process that will run a worker must do before it loads torch."""

from __future__ import annotations

from xllm_platform.registry import select

from xllm_npu.config.settings import Settings


def configure_process(settings: Settings, ranks: int = 1) -> None:
    """Threads and allocator, as the platform wants them. Raises PlatformError if the platform cannot be used.

    `ranks` workers compute on this machine.
    """
    select(settings.execution.platform).configure_process(settings.execution.num_threads or None, ranks)
