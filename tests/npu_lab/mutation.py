"""A module with one edit, to show that a test would notice it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    changed = ModuleType(module.__name__)
    original = sys.modules[module.__name__]
    sys.modules[module.__name__] = changed  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), module.__file__ or "", "exec"), changed.__dict__)
    finally:
        sys.modules[module.__name__] = original
    return changed
