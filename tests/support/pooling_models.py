"""Random checkpoints of models that give vectors, and an engine loop that pools: prompts in, vectors out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import processors

from tests.support.tiny_tokenizer import byte_tokenizer, write_tokenizer
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.master.request_factory import POOLING_PARAMS
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest

VOCAB, FIRST, LAST = 300, 257, 258  # the tokens that stand for [CLS] and [SEP]
_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 128, "max_position_embeddings": 130, "initializer_range": 0.2}
_DISTILBERT = {"vocab_size": VOCAB, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
               "max_position_embeddings": 130, "initializer_range": 0.2}


def make_encoder(directory: Path, family: str, head: str = "Model", seed: int = 0, **config: Any) -> Any:
    """Write a model directory; returns transformers' model. `family` and `head` make the class: Bert, Model."""
    sizes = _DISTILBERT if family == "DistilBert" else _SIZES
    model = _seeded(lambda: getattr(transformers, family + head)(
        getattr(transformers, f"{family}Config")(**{**sizes, **config})), seed)
    return _write(directory, model)


def make_decoder_classifier(directory: Path, num_labels: int, seed: int = 0) -> Any:
    """Qwen3ForSequenceClassification."""
    config = transformers.Qwen3Config(
        **{**_SIZES, "head_dim": 16, "num_key_value_heads": 2, "pad_token_id": 259, "num_labels": num_labels})
    return _write(directory, _seeded(lambda: transformers.Qwen3ForSequenceClassification(config), seed))


def _seeded(make: Any, seed: int) -> Any:
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():  # norms and biases are ones and zeros, which hide mistakes
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    finally:
        torch.random.set_rng_state(state)
    return model


def _write(directory: Path, model: Any) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", FIRST), ("<|im_end|>", LAST)])
    write_tokenizer(directory, backend)
    return model


def add_modules(directory: Path, mode: str, *, dense: int = 0, normalize: bool = True, max_length: int = 0
                ) -> torch.nn.Linear | None:
    """Make it a directory of sentence-transformers; returns the Dense layer of so many outputs, followed by a tanh."""
    kinds = ["Transformer", "Pooling", *["Dense"] * bool(dense), *["Normalize"] * normalize]
    modules = []
    for i, kind in enumerate(kinds):
        folder = "" if i == 0 else f"{i}_{kind}"
        (directory / folder).mkdir(exist_ok=True)
        modules.append({"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"})
    (directory / "modules.json").write_text(json.dumps(modules))
    width = json.loads((directory / "config.json").read_text())["hidden_size"]
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(
        {"word_embedding_dimension": width, "pooling_mode_cls_token": mode == "cls",
         "pooling_mode_mean_tokens": mode == "mean", "pooling_mode_max_tokens": mode == "max",
         "pooling_mode_lasttoken": mode == "last"}))
    if max_length:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    if not dense:
        return None
    from safetensors.torch import save_file

    layer = torch.nn.Linear(width, dense)
    save_file({"linear.weight": layer.weight.data, "linear.bias": layer.bias.data},
              directory / "2_Dense" / "model.safetensors")
    (directory / "2_Dense" / "config.json").write_text(json.dumps(
        {"in_features": width, "out_features": dense, "bias": True,
         "activation_function": "torch.nn.modules.activation.Tanh"}))
    return layer


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Byte tokens; none of them is one that RoBERTa's configuration takes for padding."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, length).tolist() for length in lengths]


def run_pooling(model: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[np.ndarray], EngineLoop]:
    """(each prompt's vector as the network says it, the closed loop for its statistics); all prompts at once."""
    options = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1,
               "max_seqs_per_batch": 16, **settings}
    loop = EngineLoop.create(settings_from_kwargs(model=str(model), **options))
    try:
        return pooled_by(loop, prompts), loop
    finally:
        loop.close()


def pooled_by(loop: EngineLoop, prompts: list[list[int]]) -> list[np.ndarray]:
    """The loop is left idle."""
    for i, prompt in enumerate(prompts):
        loop.submit(AddRequest(request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(),
                               params=POOLING_PARAMS, arrival_time=time.time()))
    found: dict[int, np.ndarray] = {}
    while loop.has_work():
        outputs = loop.step()
        if outputs is not None:
            assert not [f for f in outputs.finished if f.message]
            assert not outputs.tokens, "a model that gives vectors samples nothing"
            for key, vector in outputs.vectors.items():
                assert key // SEQUENCES_PER_REQUEST not in found, "one vector for each prompt"
                found[key // SEQUENCES_PER_REQUEST] = np.frombuffer(vector, np.float32)
    loop.scheduler.check_integrity()
    assert loop.scheduler.running.blocks.pool.num_used == 0
    return [found[i] for i in range(len(prompts))]
