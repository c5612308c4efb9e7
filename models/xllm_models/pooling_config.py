"""Whether a checkpoint gives vectors or scores instead of text, and how: config.json and sentence-transformers' files.

A directory of sentence-transformers has modules.json (what follows the network), 1_Pooling/config.json, perhaps folders
of Dense layers, and sentence_bert_config.json (the longest input). Classes that these files name are compared by name
and never imported. Knows JSON only, neither torch nor networks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xllm_models.config_keys import ConfigKeys, ModelConfigError, architecture_of, read_json

POOLINGS = ("last", "cls", "mean", "max")
CAUSAL, SEQUENCE, MASKED, BARE = "ForCausalLM", "ForSequenceClassification", "ForMaskedLM", "Model"
# Encoders by the front of their classes' names; the value is the family whose layout they have.
ENCODER_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "Camembert": "roberta",
                    "DistilBert": "distilbert", "MPNet": "mpnet"}
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
          "pooling_mode_lasttoken": "last"}
_OTHER_MODES = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu"}
_OVERRIDES = {"architectures", "is_matryoshka", "matryoshka_dimensions", "is_original_qwen3_reranker",
              "classifier_from_token", "num_labels", "problem_type"}


@dataclass(frozen=True, slots=True)
class PoolingWish:
    """What the user asks for."""

    runner: str = "auto"  # auto | generate | pooling
    convert: str = "auto"  # auto | none | embed | classify
    pooler: Mapping[str, Any] = field(default_factory=dict)  # pooling_type, normalize, use_activation
    overrides: Mapping[str, Any] = field(default_factory=dict)  # keys that stand for those of config.json
    qwen3_reranker: bool = False


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer behind the pooling, in a folder of its own."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str  # a value of _ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    architecture: str  # as config.json names it
    task: str  # embed | classify
    pooling: str  # one of POOLINGS
    normalize: bool = False  # embeddings have length 1
    head: str = ""  # what makes labels of the pooled vector: score | bert | roberta | distilbert | yes_no
    labels: tuple[str, ...] = ()
    activation: str = "none"  # of the labels' values: none | sigmoid | softmax
    dense: tuple[DenseLayer, ...] = ()
    matryoshka: bool = False  # the first values of a vector are an embedding too
    dimensions: tuple[int, ...] = ()  # how many of them may be asked for; empty: any number
    pairs: str = ""  # how two texts become one prompt: "" (they do not) | tokens | qwen3_reranker
    max_length: int = 0  # tokens of the longest input by sentence_bert_config.json; 0: it does not say


def encoder_family(architecture: str) -> str:
    """The family of an encoder that we have; "" for any other network."""
    for suffix in (SEQUENCE, MASKED, BARE):
        if architecture.endswith(suffix):
            return ENCODER_FAMILIES.get(architecture.removesuffix(suffix), "")
    return ""


def causal_name(architecture: str) -> str:
    """The decoder whose network this is: Qwen3Model and Qwen3ForSequenceClassification are Qwen3ForCausalLM's."""
    for suffix in (SEQUENCE, BARE):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + CAUSAL
    return architecture


def overridden(raw: Mapping[str, Any], wish: PoolingWish, source: str) -> dict[str, Any]:
    """config.json with the user's keys."""
    unknown = sorted(wish.overrides.keys() - _OVERRIDES)
    if unknown:
        raise ModelConfigError(f"hf_overrides has {unknown[0]}, which cannot be overridden; those that can: "
                               f"{', '.join(sorted(_OVERRIDES))}.")
    return {**raw, **wish.overrides}


def read_pooling(path: Path, raw: Mapping[str, Any], wish: PoolingWish) -> PoolingConfig | None:
    """None: the model generates text. `raw` is config.json, overridden. Raises ModelConfigError."""
    source = str(path / "config.json")
    architecture = architecture_of(raw, source)
    keys = ConfigKeys(raw, source)
    reranker = wish.qwen3_reranker or keys.flag("is_original_qwen3_reranker")
    modules = _modules(path)
    causal = not encoder_family(architecture) and (
        architecture.endswith("LMHeadModel") or not architecture.endswith((SEQUENCE, BARE)))
    if wish.runner == "generate":
        if causal:
            return None
        raise ModelConfigError(f"{source}: {architecture} gives vectors and generates no text: leave --runner generate "
                               "out.")
    pooled = not causal or reranker or modules is not None or wish.convert in ("embed", "classify")
    if wish.runner == "auto" and not pooled:
        return None
    if reranker:
        return _reranker(architecture, keys, wish)
    if architecture.endswith(SEQUENCE) and wish.convert != "embed":
        return _classifier(architecture, keys, wish)
    if wish.convert == "classify":
        raise ModelConfigError(f"{source}: {architecture} has no classification head. --convert classify is for "
                               "...ForSequenceClassification, and for Qwen3-Reranker with --enable-qwen3-reranker.")
    return _embedder(architecture, keys, path, modules, wish)


def _embedder(architecture: str, keys: ConfigKeys, path: Path, modules: list[tuple[str, str]] | None, wish: PoolingWish
              ) -> PoolingConfig:
    pooling = "cls" if encoder_family(architecture) else "last"
    normalize, dense = True, []
    if modules is not None:
        normalize = False
        for kind, folder in modules:
            if kind == "Pooling":
                pooling = _pooling_mode(read_json(path / folder / "config.json"), path / folder / "config.json")
            elif kind == "Dense":
                dense.append(_dense(path, folder))
            elif kind == "Normalize":
                normalize = True
            elif kind not in ("Transformer", "Dropout"):
                raise ModelConfigError(f"{path / 'modules.json'}: has a module {kind}; known: Transformer, Pooling, "
                                       "Dense, Normalize.")
    dimensions = keys.ids("matryoshka_dimensions")
    return PoolingConfig(
        architecture=architecture, task="embed", pooling=_asked_pooling(wish) or pooling,
        normalize=_asked_flag(wish, normalize), dense=tuple(dense),
        matryoshka=keys.flag("is_matryoshka") or bool(dimensions), dimensions=tuple(sorted(dimensions)),
        max_length=_max_length(path))


def _classifier(architecture: str, keys: ConfigKeys, wish: PoolingWish) -> PoolingConfig:
    family = encoder_family(architecture)
    labels = _labels(keys)
    one = len(labels) == 1
    activation = "sigmoid" if one or keys.text("problem_type", "") == "multi_label_classification" else "softmax"
    activation = (_own_activation(keys) if one else "") or activation
    if not _asked_flag(wish, True):
        activation = "none"
    heads = {"mpnet": "roberta"}
    return PoolingConfig(
        architecture=architecture, task="classify", pooling=_asked_pooling(wish) or ("cls" if family else "last"),
        head=heads.get(family, family) or "score", labels=labels, activation=activation, pairs="tokens")


def _reranker(architecture: str, keys: ConfigKeys, wish: PoolingWish) -> PoolingConfig:
    """Qwen3-Reranker answers yes or no; the score is how much likelier it says yes (its model card)."""
    if architecture != "Qwen3ForCausalLM" and not (keys.flag("is_original_qwen3_reranker")
                                                   and architecture == "Qwen3ForSequenceClassification"):
        raise keys.error("architectures", f"is {architecture}; --enable-qwen3-reranker is for Qwen3ForCausalLM.")
    words = keys.get("classifier_from_token")
    if words not in (None, ["no", "yes"]):
        raise keys.error("classifier_from_token", 'must be ["no", "yes"], as Qwen3-Reranker answers.')
    activation = "sigmoid" if _asked_flag(wish, True) else "none"
    return PoolingConfig(architecture=architecture, task="classify", pooling="last", head="yes_no", labels=("LABEL_0",),
                         activation=activation, pairs="qwen3_reranker")


def _labels(keys: ConfigKeys) -> tuple[str, ...]:
    names = keys.get("id2label")
    if keys.get("num_labels") is not None or not isinstance(names, Mapping) or not names:
        return tuple(f"LABEL_{i}" for i in range(keys.count("num_labels", 2)))
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except ValueError:
        raise keys.error("id2label", "must have numbers for keys.") from None


def _own_activation(keys: ConfigKeys) -> str:
    """A cross-encoder of sentence-transformers may name its own for its one label."""
    section = keys.get("sentence_transformers")
    name = section.get("activation_fn") if isinstance(section, Mapping) else None
    name = name or keys.get("sbert_ce_default_activation_function")
    if not isinstance(name, str):
        return ""
    known = {"Identity": "none", "Sigmoid": "sigmoid"}
    kind = name.rpartition(".")[2]
    if kind not in known:
        raise keys.error("sentence_transformers", f"names the activation {kind}; known: {', '.join(known)}.")
    return known[kind]


def _modules(path: Path) -> list[tuple[str, str]] | None:
    """(kind, folder) of each module, in order; None: no directory of sentence-transformers."""
    file = path / "modules.json"
    if not file.is_file():
        return None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        listed = [(str(m["type"]).rpartition(".")[2], str(m["path"]), m["idx"])
                  for m in sorted(modules, key=lambda m: m["idx"])]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelConfigError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    for _, folder, _ in listed:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ModelConfigError(f"{file}: names the folder {folder!r}, which lies outside of the model.")
    if listed and listed[0][1] not in ("", "."):
        raise ModelConfigError(f"{file}: has its network in the folder {listed[0][1]!r}; only those with config.json "
                               "beside modules.json are known.")
    return [(kind, folder) for kind, folder, _ in listed]


def _pooling_mode(config: Mapping[str, Any], file: Path) -> str:
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list) else [
        name for key, name in _MODES.items() if config.get(key)]
    modes += [key for key in _OTHER_MODES if config.get(key)]
    modes = ["last" if one == "lasttoken" else one for one in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelConfigError(f"{file}: pools by {' and '.join(map(str, modes)) or 'nothing'}; one of "
                               f"{', '.join(POOLINGS)} is known.")
    return str(modes[0])


def _dense(path: Path, folder: str) -> DenseLayer:
    file = path / folder / "config.json"
    keys = ConfigKeys(read_json(file), str(file))
    name = keys.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise keys.error("activation_function", f"is {name}; known: {', '.join(_ACTIVATIONS)}.")
    return DenseLayer(folder, keys.count("in_features"), keys.count("out_features"), keys.flag("bias", True),
                      _ACTIVATIONS[name])


def _max_length(path: Path) -> int:
    file = path / "sentence_bert_config.json"
    if not file.is_file():
        return 0
    keys = ConfigKeys(read_json(file), str(file))
    return keys.count("max_seq_length") if keys.get("max_seq_length") is not None else 0


def _asked_pooling(wish: PoolingWish) -> str:
    known = {"pooling_type", "seq_pooling_type", "normalize", "use_activation", "activation"}
    unknown = sorted(wish.pooler.keys() - known)
    if unknown:
        raise ModelConfigError(f"pooler_config has {unknown[0]}; known: {', '.join(sorted(known))}.")
    asked = wish.pooler.get("seq_pooling_type") or wish.pooler.get("pooling_type") or ""
    if asked and str(asked).lower() not in POOLINGS:
        raise ModelConfigError(f"pooler_config has pooling_type {asked!r}; known: {', '.join(POOLINGS)}.")
    return str(asked).lower()


def _asked_flag(wish: PoolingWish, default: bool) -> bool:
    for key in ("use_activation", "normalize", "activation"):
        value = wish.pooler.get(key)
        if value is not None:
            if not isinstance(value, bool):
                raise ModelConfigError(f"pooler_config has {key} {value!r}; it takes true or false.")
            return value
    return default
