"""Fused, interleaved, sandwiched, capped and sunk: each family on two ranks, real processes over gloo, against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xllm_platform.parallel import ExpertExchange

from tests.support.paged_model import PagedModel
from tests.support.ranks import World, run_ranks

DENSE = {
    "phi3": {"sliding_window": 6},
    "glm": {},
    "glm4": {},
    "gemma2": {"sliding_window": 6, "tie_word_embeddings": True},
    "gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1},
}
SPARSE = {
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_qk_norm": True,
                 "attention_bias": True},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 8},
}
LAYOUTS = [(1, 1), (2, 1), (2, 2)]  # ep, expert parallel degree
PROMPT = [3, 7, 11, 100, 5, 9, 41, 77, 130, 100, 2, 33, 8]


def drive(paged: PagedModel) -> torch.Tensor:
    return torch.cat([paged.logits([(0, part)])[0] for part in (PROMPT[:8], PROMPT[8:12], PROMPT[12:])])


def on_each_rank(world: World, directories: list[str], layouts: list[list[int]]) -> list[torch.Tensor]:
    found = []
    for directory in directories:
        for ep, degree in layouts:
            with world.join(tp_size=2, ep_size=ep, experts=ExpertExchange(all_to_all=degree == 2)) as parallel:
                found.append(drive(PagedModel(directory, parallel=parallel)))
    return found


def check(directories: list[Path], layouts: list[tuple[int, int]]) -> None:
    answers = run_ranks(on_each_rank, 2, [str(d) for d in directories], layouts)
    for i, directory in enumerate(directories):
        alone = drive(PagedModel(directory))
        assert alone.std() > 0.5
        for rank in range(2):
            for logits in answers[rank][i * len(layouts) : (i + 1) * len(layouts)]:
                torch.testing.assert_close(logits, alone, rtol=0, atol=1e-3)


def randomise(directory: Path) -> None:
    """Norms and biases as trained ones are: not ones and zeros, which hide mistakes."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("bias"):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.multiprocess
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, sparse):
    from tests.support.mxfp4_model import make_mxfp4_model  # not above: the ranks need no transformers
    from tests.support.tiny_model import make_tiny_model

    directories = [make_tiny_model(tmp_path / name, name, **config)
                   for name, config in (SPARSE if sparse else DENSE).items()]
    for directory in directories:
        randomise(directory)
    if sparse:  # 96 columns on two ranks: half of the second of three blocks each
        directories.append(tmp_path / "mxfp4")
        make_mxfp4_model(directories[-1])
    check(directories, LAYOUTS if sparse else LAYOUTS[:1])
