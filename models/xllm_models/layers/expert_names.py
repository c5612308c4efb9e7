"""What checkpoints call the parts of a mixture-of-experts block, by model type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names are relative to the block, and the block's to its layer."""

    block: str = "mlp"
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"  # "experts.7.gate_proj.weight", or stacked: "experts.gate_up_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"  # stacked only
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    stacked: bool = False  # one tensor for all experts: gate_up [E, 2I, N], down [E, N, I], biases with "_bias"
    transposed: bool = False  # stacked as [E, N, 2I] and [E, I, N]
    interleaved: bool = False  # stacked gates and ups alternate instead of halves


_NAMES = {
    "gpt_oss": ExpertNames(router="router", stacked=True, transposed=True, interleaved=True),
    "mixtral": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen2_moe": ExpertNames(shared="shared_expert"),
}


def expert_names(model_type: str) -> ExpertNames:
    return _NAMES.get(model_type, ExpertNames())
