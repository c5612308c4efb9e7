"""In which dtype a model is computed: the one asked for, or the checkpoint's if the device is not slow in it."""

from types import SimpleNamespace

import pytest
import torch

from xllm_npu.execution.load_plan import choose_dtype
from xllm_npu.execution.model_loader import LoadError


@pytest.mark.parametrize(("asked", "stored", "slow", "expected"), [
    ("auto", "bfloat16", (), torch.bfloat16),
    ("auto", "bfloat16", ("bfloat16",), torch.float32),
    ("auto", "float16", ("bfloat16",), torch.float16),
    ("bfloat16", "bfloat16", ("bfloat16",), torch.bfloat16),
    ("float32", "bfloat16", (), torch.float32),
])
def test_choice(asked, stored, slow, expected):
    capabilities = SimpleNamespace(dtypes=("float32", "bfloat16", "float16"), slow_dtypes=slow)
    settings = SimpleNamespace(model=SimpleNamespace(dtype=asked))
    config = SimpleNamespace(torch_dtype=stored)
    assert choose_dtype(settings, config, SimpleNamespace(name="some", capabilities=capabilities)) == expected


def test_what_the_platform_lacks_is_refused():
    capabilities = SimpleNamespace(dtypes=("float16", "float32"), slow_dtypes=())
    settings = SimpleNamespace(model=SimpleNamespace(dtype="auto"))
    with pytest.raises(LoadError, match="Platform some does not compute in bfloat16: set --dtype to one of float16"):
        choose_dtype(settings, SimpleNamespace(torch_dtype="bfloat16"),
                     SimpleNamespace(name="some", capabilities=capabilities))
