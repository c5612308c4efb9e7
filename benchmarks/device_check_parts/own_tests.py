"""Makes `tests` this repository's folder: a package of that name among the installed ones would win, as it has an
`__init__.py` and ours has none. Imported before anything of `tests`.
"""

import sys
from pathlib import Path
from types import ModuleType

_package = ModuleType("tests")
_package.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
sys.modules["tests"] = _package
