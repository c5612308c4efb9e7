"""A trace of a worker's steps, for trace viewers: operators on host and device, by the platform's profiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xllm_platform.base import Platform


class ProfileError(RuntimeError):
    """There is no profile; the message says why."""


class StepProfile:
    """On the thread that runs the steps, which alone is traced."""

    def __init__(self, platform: Platform, name: str) -> None:
        """`name`: of this worker, in its files' names."""
        self._platform, self._name = platform, name
        self._profiler: Any = None

    def switch(self, directory: str) -> None:
        """Begin a trace, or with "" end it and write it. Raises ProfileError."""
        if directory:
            self._begin(Path(directory))
        else:
            self._end()

    def _begin(self, directory: Path) -> None:
        if self._profiler is not None:
            raise ProfileError("A profile is being made already; end it first.")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError("it cannot be written to")
            profiler = self._platform.profiler(str(directory), self._name)
            profiler.start()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProfileError(f"The profile cannot be begun: {reason}. Check --profile_dir.") from error
        self._profiler = profiler

    def _end(self) -> None:
        if self._profiler is None:
            raise ProfileError("No profile is being made.")
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProfileError(f"The profile cannot be written: {reason}.") from error
