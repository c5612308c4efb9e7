import tempfile

import pytest

from xllm_npu.execution.socket_directory import FALLBACK, LONGEST_PATH, socket_parent
from xllm_npu.master.engine_group import new_directory


@pytest.mark.parametrize("length", [20, 59, 60, 200])
def test_a_long_temporary_directory_is_not_for_sockets(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    parent = "/" + "d" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", parent)
    assert socket_parent() == (parent if length <= 59 else FALLBACK)
    assert len(f"{new_directory()}/requests-1000") <= LONGEST_PATH
