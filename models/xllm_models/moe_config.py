"""The mixture-of-experts part of a model's configuration: how tokens choose experts and what an expert is.

Read from config.json by `ModelConfig`; knows no weights and no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]  # [num_layers]: which layers have experts; the others have a plain MLP
    scoring: str = "softmax"  # softmax | sigmoid over all experts, or softmax_top_k: over the chosen ones' logits
    normalize: bool = True  # the chosen weights sum to one
    scaling_factor: float = 1.0  # on the chosen weights, after normalising
    correction_bias: bool = False  # a learned bias per expert decides who is chosen, not how much it weighs
    num_groups: int = 1  # experts lie in this many equal groups
    top_groups: int = 1  # and only this many groups may be chosen from
    group_score: str = "max"  # a group's score: max | top2_sum of its experts' scores
    shared_intermediate_size: int = 0  # width of the experts that every token visits, together; 0: none
    shared_gate: bool = False  # a sigmoid gate on the shared experts' output
    bias: bool = False  # on the router and on the experts' matrices
    activation: str = "silu"  # silu | clamped_swiglu (gpt-oss)
