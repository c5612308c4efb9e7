"""compile_decode: the same logits as eager, one trace for the layers of all depths, whatever their windows."""

import shutil

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.support.paged_model import PagedModel

SMALL = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "sliding_window": 12,
         "pad_token_id": 0}
# Two kinds of layer (the first has no residual), each for one row and for any number of rows.
GRAPHS = 6
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=2)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(
        **SMALL, head_dim=16, layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 3])),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=5, num_experts_per_tok=2)),
}


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt-oss"])
def test_compiled_layers_equal_eager_ones(tmp_path, name):
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model_class, config = MODELS[name]
    model_class(config).save_pretrained(tmp_path)
    eager, compiled = PagedModel(tmp_path), PagedModel(tmp_path)
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
    assert counters["stats"]["unique_graphs"] <= GRAPHS
    assert not counters["graph_break"]
    torch._dynamo.reset()
