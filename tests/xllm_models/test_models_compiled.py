"""compile_decode: the same logits as eager, one trace for the layers of all depths, whatever their windows."""

import shutil

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.paged_model import PagedModel

CONFIG = Qwen2Config(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, use_sliding_window=True,
                     sliding_window=12, max_window_layers=2)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_compiled_layers_equal_eager_ones(tmp_path, dtype):
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(tmp_path)
    eager, compiled = PagedModel(tmp_path, dtype=dtype), PagedModel(tmp_path, dtype=dtype)
    prompts = [torch.randint(0, 96, (20 + i,)).tolist() for i in range(4)]
    for paged in (eager, compiled):
        paged.logits(list(enumerate(prompts)))
    torch._dynamo.reset()
    counters.clear()
    compiled.forward = compiled.model.compile_decode()
    for size in (1, 3, 4, 2):
        rows = [(i, [i + 5]) for i in range(size)]
        for ours, expected in zip(compiled.logits(rows), eager.logits(rows)):
            torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)
    # Two shapes of layer (the first has no residual), each for one row and for any number of rows.
    assert counters["stats"]["unique_graphs"] <= 6
    assert not counters["graph_break"]
    torch._dynamo.reset()
