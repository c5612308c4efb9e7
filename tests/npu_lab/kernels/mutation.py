"""A kernel's module with one place of its source changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    file = folder / "changed.py"  # Triton reads a kernel's source from its file
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed", file)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed
