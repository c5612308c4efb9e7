"""config.json of an encoder (BERT and its relatives) as a `ModelConfig`, with what only encoders have beside it.

Names and defaults are transformers': BERT and RoBERTa share them, DistilBERT has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xllm_models.config_keys import ConfigKeys


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    family: str  # bert | roberta | distilbert | mpnet: what the checkpoint calls its tensors
    num_types: int  # of tokens: 2 where the second text of a pair has embeddings of its own; 0: there are none
    num_positions: int  # rows of the position embeddings
    first_position: int  # the row of a sequence's first token
    norm_eps: float
    relative_buckets: int = 0  # MPNet: distances that have a bias of their own; 0: there is no such bias


# transformers' defaults; a config.json need not repeat them.
_BERT = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
         "layer_norm_eps": 1e-12, "pad_token_id": 0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_BERT, "vocab_size": 50265, "pad_token_id": 1},
    "distilbert": {**_BERT, "type_vocab_size": 0},
    "mpnet": {**_BERT, "vocab_size": 30527, "type_vocab_size": 0, "pad_token_id": 1,
              "relative_attention_num_buckets": 32},
}
_DISTILBERT_NAMES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                     "intermediate_size": "hidden_dim", "hidden_act": "activation"}


def read_encoder(raw: Mapping[str, Any], family: str, source: str) -> tuple[EncoderConfig, dict[str, Any]]:
    """(what only encoders have, the fields of `ModelConfig`). Raises ModelConfigError."""
    given = dict(raw)
    if family == "distilbert":
        given |= {name: raw[own] for name, own in _DISTILBERT_NAMES.items() if own in raw}
    keys = ConfigKeys({**_DEFAULTS[family], **{k: v for k, v in given.items() if v is not None}}, source)
    kind = keys.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise keys.error("position_embedding_type", f'is "{kind}"; known: absolute.')
    for name in ("is_decoder", "add_cross_attention"):
        if keys.flag(name):
            raise keys.error(name, "is true: this is no encoder alone.")
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads:
        raise keys.error("num_attention_heads", f"is {heads}, which does not divide hidden_size={hidden}.")
    pad = next(iter(keys.ids("pad_token_id")), 0)
    first = pad + 1 if family in ("roberta", "mpnet") else 0
    positions = keys.count("max_position_embeddings")
    if positions <= first:
        raise keys.error("max_position_embeddings", f"is {positions}, which leaves no room for a text.")
    types = 0 if family in ("distilbert", "mpnet") else keys.count("type_vocab_size")
    encoder = EncoderConfig(family, types, positions, first,
                            1e-12 if family == "distilbert" else keys.positive_number("layer_norm_eps", 1e-12),
                            keys.count("relative_attention_num_buckets") if family == "mpnet" else 0)
    return encoder, {
        "model_type": keys.text("model_type", family), "vocab_size": keys.count("vocab_size"), "hidden_size": hidden,
        "intermediate_size": keys.count("intermediate_size"), "num_layers": keys.count("num_hidden_layers"),
        "num_heads": heads, "num_kv_heads": heads, "head_dim": hidden // heads,
        "max_position_embeddings": positions - first, "hidden_act": keys.text("hidden_act", "gelu"),
    }
