"""The mixture-of-experts part of a model's configuration: how tokens choose experts and what an expert is.

Read from config.json by `ModelConfig`, with one small reader a model type; knows no weights and no ranks. An absent
key takes the value that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xllm_models.config_keys import ConfigKeys


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
    float32_logits: bool = False  # the router's product is float32 whatever the model's dtype is
    num_groups: int = 1  # experts lie in this many equal groups
    top_groups: int = 1  # and only this many groups may be chosen from
    group_score: str = "max"  # a group's score: max | top2_sum of its experts' scores
    shared_intermediate_size: int = 0  # width of the experts that every token visits, together; 0: none
    shared_gate: bool = False  # a sigmoid gate on the shared experts' output
    bias: bool = False  # on the router and on the experts' matrices
    activation: str = ""  # of an expert: "" is the model's hidden_act | clamped_swiglu (gpt-oss)


def read_moe(keys: ConfigKeys, model_type: str, num_layers: int) -> MoeConfig | None:
    """None: every layer of this model type has a plain MLP."""
    reader = _READERS.get(model_type)
    if reader is None:
        return None
    moe = reader(keys, num_layers)
    if moe.top_k > moe.num_experts:
        raise keys.error("num_experts_per_tok", f"is {moe.top_k}, and there are {moe.num_experts} experts.")
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        problem = f"is {moe.num_groups}, which must divide the {moe.num_experts} experts and be at least topk_group."
        raise keys.error("n_group", problem)
    if moe.group_score == "top2_sum" and moe.top_groups < moe.num_groups and moe.num_experts < 2 * moe.num_groups:
        raise keys.error("n_group", f"is {moe.num_groups}: the groups of {moe.num_experts} experts need two each.")
    return moe if any(moe.layers) else None


def expert_count(keys: ConfigKeys, default: int) -> int:
    """transformers writes some model types' num_experts as num_local_experts since 5.0."""
    name = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    return keys.count(name, default)


def _qwen3_moe(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=expert_count(keys, 128), top_k=keys.count("num_experts_per_tok", 8),
        intermediate_size=keys.count("moe_intermediate_size", 768), layers=_qwen_layers(keys, num_layers),
        normalize=keys.flag("norm_topk_prob"),
    )


def _qwen2_moe(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=expert_count(keys, 60), top_k=keys.count("num_experts_per_tok", 4),
        intermediate_size=keys.count("moe_intermediate_size", 1408), layers=_qwen_layers(keys, num_layers),
        normalize=keys.flag("norm_topk_prob"),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size", 5632), shared_gate=True,
    )


def _qwen_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    step, plain = keys.count("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise keys.error("mlp_only_layers", f"must be a list of layers, not {plain!r}.")
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers))


def _mixtral(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=expert_count(keys, 8), top_k=keys.count("num_experts_per_tok", 2),
        intermediate_size=keys.count("intermediate_size", 14336), layers=(True,) * num_layers,
    )


def _deepseek_v2(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    method = keys.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.error("topk_method", f'is "{method}"; supported: greedy, group_limited_greedy.')
    groups = (1, 1) if method == "greedy" else (keys.count("n_group"), keys.count("topk_group"))
    return MoeConfig(
        num_experts=keys.count("n_routed_experts", 64), top_k=keys.count("num_experts_per_tok", 1),
        intermediate_size=keys.count("moe_intermediate_size", 1407), layers=_deepseek_layers(keys, num_layers, 0),
        normalize=False,  # transformers never normalises this family's weights; its checkpoints do not ask for it
        scaling_factor=keys.positive_number("routed_scaling_factor", 1.0), float32_logits=True,
        num_groups=groups[0], top_groups=groups[1], group_score="max",
        shared_intermediate_size=_shared_width(keys, 1407, 2),
    )


def _deepseek_v3(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=keys.count("n_routed_experts", 256), top_k=keys.count("num_experts_per_tok", 8),
        intermediate_size=keys.count("moe_intermediate_size", 2048), layers=_deepseek_layers(keys, num_layers, 3),
        scoring="sigmoid", normalize=keys.flag("norm_topk_prob", True), correction_bias=True, float32_logits=True,
        scaling_factor=keys.positive_number("routed_scaling_factor", 2.5), num_groups=keys.count("n_group", 8),
        top_groups=keys.count("topk_group", 4), group_score="top2_sum",
        shared_intermediate_size=_shared_width(keys, 2048, 1),
    )


def _shared_width(keys: ConfigKeys, width: int, count: int) -> int:
    if keys.has("n_shared_experts") and keys.get("n_shared_experts") in (None, 0):
        return 0
    return keys.count("moe_intermediate_size", width) * keys.count("n_shared_experts", count)


def _deepseek_layers(keys: ConfigKeys, num_layers: int, dense: int) -> tuple[bool, ...]:
    """The first layers are plain, of those after them every moe_layer_freq-th has experts."""
    if keys.has("n_routed_experts") and keys.get("n_routed_experts") is None:
        return (False,) * num_layers
    kinds = keys.get("mlp_layer_types")  # the newer spelling, which lists them
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers or set(kinds) - {"dense", "sparse"}:
            raise keys.error("mlp_layer_types", f'must say "dense" or "sparse" for {num_layers} layers, not {kinds!r}.')
        return tuple(kind == "sparse" for kind in kinds[:num_layers])
    first = keys.get("first_k_dense_replace")
    first = dense if first is None else first and keys.count("first_k_dense_replace")  # 0 is a fine value here
    step = keys.count("moe_layer_freq", 1)
    return tuple(i >= first and i % step == 0 for i in range(num_layers))


def _glm4_moe(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=keys.count("n_routed_experts", 128), top_k=keys.count("num_experts_per_tok", 8),
        intermediate_size=keys.count("moe_intermediate_size", 1408), layers=_deepseek_layers(keys, num_layers, 1),
        scoring="sigmoid", normalize=keys.flag("norm_topk_prob", True), correction_bias=True, float32_logits=True,
        scaling_factor=keys.number("routed_scaling_factor", 1.0), num_groups=keys.count("n_group", 1),
        top_groups=keys.count("topk_group", 1), group_score="top2_sum",
        shared_intermediate_size=_shared_width(keys, 1408, 1),
    )


def _gpt_oss(keys: ConfigKeys, num_layers: int) -> MoeConfig:
    for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if keys.number(key, known) != known:
            raise keys.error(key, f"is {keys.get(key)}; only {known} is supported.")
    top_k = "num_experts_per_tok" if keys.get("num_experts_per_tok") is not None else "experts_per_token"
    return MoeConfig(
        num_experts=expert_count(keys, 128), top_k=keys.count(top_k, 4),
        intermediate_size=keys.count("intermediate_size", 2880), layers=(True,) * num_layers, scoring="softmax_top_k",
        bias=True, activation="clamped_swiglu",
    )


_READERS: dict[str, Callable[[ConfigKeys, int], MoeConfig]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
