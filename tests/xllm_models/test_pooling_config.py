"""Which checkpoints give vectors, and how: config.json, sentence-transformers' files, and what the user says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from xllm_models.config_keys import ModelConfigError
from xllm_models.pooling_config import PoolingWish, overridden, read_pooling
from xllm_models.registry import read_model_config

QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


def read(path: Path, config: dict[str, Any], **wish: Any):
    wanted = PoolingWish(**wish)
    return read_pooling(path, overridden(config, wanted, "config.json"), wanted)


def write_modules(path: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    modules = [{"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": f"st.models.{kind}"}
               for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_lasttoken": True}))


@pytest.mark.parametrize(("architecture", "task", "pooling", "head"), [
    ("BertModel", "embed", "cls", ""), ("MPNetForMaskedLM", "embed", "cls", ""), ("Qwen3Model", "embed", "last", ""),
    ("BertForSequenceClassification", "classify", "cls", "bert"),
    ("XLMRobertaForSequenceClassification", "classify", "cls", "roberta"),
    ("MPNetForSequenceClassification", "classify", "cls", "roberta"),
    ("LlamaForSequenceClassification", "classify", "last", "score"),
])
def test_networks_that_generate_nothing_give_vectors_by_themselves(
    tmp_path: Path, architecture: str, task: str, pooling: str, head: str
) -> None:
    found = read(tmp_path, {"architectures": [architecture]})
    assert found is not None
    assert (found.task, found.pooling, found.head) == (task, pooling, head)
    with pytest.raises(ModelConfigError, match="generates no text"):
        read(tmp_path, {"architectures": [architecture]}, runner="generate")


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"])
def test_networks_that_generate_do_so_unless_told(tmp_path: Path, architecture: str) -> None:
    assert read(tmp_path, {"architectures": [architecture]}) is None
    found = read(tmp_path, {"architectures": [architecture]}, runner="pooling")
    assert found is not None
    assert (found.task, found.pooling, found.normalize) == ("embed", "last", True)
    assert read(tmp_path, {"architectures": [architecture]}, convert="embed") == found


def test_modules_of_sentence_transformers_make_a_decoder_an_embedder(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling")
    found = read(tmp_path, QWEN3)
    assert found is not None
    assert (found.pooling, found.normalize) == ("last", False)
    assert read(tmp_path, QWEN3, runner="generate") is None
    asked = read(tmp_path, QWEN3, pooler={"pooling_type": "MEAN", "use_activation": True})
    assert asked is not None
    assert (asked.pooling, asked.normalize) == ("mean", True)


@pytest.mark.parametrize(("kinds", "pooling", "named"), [
    (("Transformer", "Pooling", "LSTM"), None, "LSTM"),
    (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls and mean"),
    (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
])
def test_what_is_not_known_of_them_is_named(tmp_path: Path, kinds, pooling, named: str) -> None:
    write_modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(ModelConfigError, match=named):
        read(tmp_path, QWEN3)


def test_folders_outside_of_the_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(
        [{"idx": 0, "path": "", "type": "Transformer"}, {"idx": 1, "path": "../x", "type": "Pooling"}]))
    with pytest.raises(ModelConfigError, match="outside"):
        read(tmp_path, QWEN3)


def test_labels_and_their_activation(tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"]}
    cases = [
        ({"id2label": {"0": "only"}}, ("only",), "sigmoid"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "softmax"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
         ("LABEL_0",), "none"),
    ]
    for extra, labels, activation in cases:
        found = read(tmp_path, config | extra)
        assert found is not None
        assert (found.labels, found.activation) == (labels, activation)
    with pytest.raises(ModelConfigError, match="Custom"):
        read(tmp_path, config | {"num_labels": 1, "sentence_transformers": {"activation_fn": "my.Custom"}})


def test_settings_for_vectors_are_refused_where_text_is_generated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for wish in ({"overrides": {"is_matryoshka": True}}, {"pooler": {"pooling_type": "LAST"}}):
        with pytest.raises(ModelConfigError, match="runner pooling"):
            read_model_config(tmp_path, wish=PoolingWish(**wish))


def test_matryoshka_is_said_by_the_model_or_the_user(tmp_path: Path) -> None:
    for config, wish in (({"is_matryoshka": True}, {}), ({}, {"overrides": {"is_matryoshka": True}}),
                         ({"matryoshka_dimensions": [128, 64]}, {})):
        found = read(tmp_path, {**QWEN3, **config}, runner="pooling", **wish)
        assert found is not None
        assert found.matryoshka
    assert found.dimensions == (64, 128)
