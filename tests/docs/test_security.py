"""The table of limits says what the code does."""

import importlib
import re

from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text("utf-8")
ROWS = re.findall(r"^\| .+? \| ([\d.]+) \| `([\w.]+)\.([A-Z_]+)` \|$", TEXT, re.MULTILINE)
# Bounds that no client chooses.
OURS = {("state.sampling_params", "MAX_LENGTH_PENALTY"), ("service.console_state", "MAX_AGE"),
        ("service.errors", "MAX_MESSAGE_CHARS")}


def test_every_limit_is_the_code_s():
    assert len(ROWS) > 20
    for value, module, name in ROWS:
        assert getattr(importlib.import_module(f"xllm_npu.{module}"), name) == float(value), name


def test_no_limit_of_the_service_is_missing():
    told = {(module, name) for _, module, name in ROWS} | OURS
    there = set()
    for path in [*(ROOT / "xllm_npu" / "service").glob("*.py"), ROOT / "xllm_npu" / "state" / "sampling_params.py",
                 ROOT / "xllm_npu" / "state" / "repetition.py", ROOT / "xllm_npu" / "master" / "request_factory.py"]:
        for name in re.findall(r"^(MAX_\w+)\s*=", path.read_text("utf-8"), re.MULTILINE):
            there.add((f"{path.parent.name}.{path.stem}", name))
    assert there - told == set(), "a row of docs/security.md says what it bounds"
