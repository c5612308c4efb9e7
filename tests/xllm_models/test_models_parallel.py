"""Tensor parallelism: two ranks in two threads, whose collectives the test performs, against one rank."""

import threading

import pytest
import torch
import xllm_models.layers.embedding
import xllm_models.layers.linear
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from xllm_models.config import ModelConfig
from xllm_models.layers.sharding import Shard, ShardingError
from xllm_platform.parallel import Group, ParallelState

from tests.support.paged_model import PagedModel

SMALL = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "initializer_range": 0.3}
CASES = {
    "kv-split": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "kv-replicated": (Qwen3ForCausalLM, Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=12,
                                                    tie_word_embeddings=True)),
}


class Collectives:
    """Ranks meet at a barrier, leave their tensor, and each computes the result from all of them."""

    def __init__(self, size):
        self.barrier, self.left = threading.Barrier(size, timeout=60), [None] * size

    def exchange(self, tensor, group):
        self.barrier.wait()
        self.left[group.rank] = tensor.clone()
        self.barrier.wait()
        return list(self.left)

    def all_reduce(self, tensor, group):
        return tensor.copy_(sum(self.exchange(tensor, group))) if group.size > 1 else tensor

    def all_gather(self, tensor, group, dim=0):
        return torch.cat(self.exchange(tensor, group), dim) if group.size > 1 else tensor


def parallel(rank, size):
    one = Group()
    return ParallelState(world=one, tp=Group(tuple(range(size)), rank), dp=one, ep=one, moe_tp=one)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name, tmp_path, monkeypatch):
    model_class, config = CASES[name]
    torch.manual_seed(0)
    model = model_class(config)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    collectives = Collectives(2)
    for module in (xllm_models.layers.linear, xllm_models.layers.embedding):
        monkeypatch.setattr(module, "all_reduce", collectives.all_reduce)
    monkeypatch.setattr(xllm_models.layers.embedding, "all_gather", collectives.all_gather)
    ids = torch.randint(0, 96, (21,)).tolist()
    steps = [ids[:15], ids[15:20], ids[20:]]

    def run(state):
        paged = PagedModel(tmp_path, parallel=state)
        return torch.cat([paged.logits([(0, step)])[0] for step in steps])

    expected, found = run(None), [None, None]

    def rank(index):
        try:
            found[index] = run(parallel(index, 2))
        except BaseException:
            collectives.barrier.abort()  # or the other rank would wait for the whole timeout
            raise

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


def test_ranks_hold_halves(tmp_path):
    model_class, config = CASES["kv-split"]
    model_class(config).save_pretrained(tmp_path)
    from xllm_models.registry import build_model

    ours = ModelConfig.from_path(tmp_path)
    whole = build_model(ours, dtype=torch.float32)
    half = build_model(ours, dtype=torch.float32, parallel=parallel(1, 2))

    def size(model, part):
        return sum(p.numel() for n, p in model.named_parameters() if part in n and "weight" in n)

    for part in ("qkv", "output", "gate_up", "down", "embedding", "head"):
        assert size(half, part) * 2 == size(whole, part)


def two_kv_heads():
    config = LlamaConfig(**SMALL, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
    return ModelConfig.from_dict(config.to_dict())


@pytest.mark.parametrize(("size", "kv"), [(1, [(0, 1, 2)]), (2, [(0, 2, 1), (1, 2, 1)]),
                                          (4, [(0, 2, 1), (0, 2, 1), (1, 2, 1), (1, 2, 1)])])
def test_key_value_heads_are_split_then_shared(size, kv):
    config = two_kv_heads()
    shards = [Shard.of(config, Group(tuple(range(size)), rank)) for rank in range(size)]
    assert [(s.kv_index, s.kv_count, s.num_kv_heads) for s in shards] == kv


def test_impossible_sizes_name_those_that_work():
    config = two_kv_heads()
    with pytest.raises(ShardingError, match=r"tp_size=3.*work: 1, 2, 4\."):
        Shard.of(config, Group((0, 1, 2), 0))
