"""From a network's pooled output to what is sent back: labels' values, or an embedding through Dense layers.

Small, in float32, and whole on every rank. Which positions are pooled is the worker's affair. Activations of labels and
an embedding's length are left to the reader, who may ask for fewer dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from xllm_models.config import ModelConfig
from xllm_models.config_keys import ModelConfigError
from xllm_models.encoder import checkpoint_prefix
from xllm_models.layers.linear import empty_parameter
from xllm_models.placement import Placement
from xllm_models.pooling_config import DenseLayer
from xllm_models.weights.dummy_source import DummySource
from xllm_models.weights.loader import check_weights, load_weights
from xllm_models.weights.renamed_source import RenamedSource
from xllm_models.weights.source import WeightSource, open_source

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu}
# Head -> its linear layers in the checkpoint (the last one's rows are the labels), and what follows all but the last.
_HEADS = {
    "score": (("score",), "none"), "bert": (("bert.pooler.dense", "classifier"), "tanh"),
    "roberta": (("classifier.dense", "classifier.out_proj"), "tanh"),
    "distilbert": (("pre_classifier", "classifier"), "relu"),
}
_ANSWERS = ("no", "yes")


class Linear(nn.Module):
    def __init__(self, name: str, rows: int, columns: int, bias: bool, activation: str, device: torch.device) -> None:
        super().__init__()
        self.name, self.activation = name, _ACTIVATIONS[activation]
        self.weight = empty_parameter((rows, columns), torch.float32, device)
        self.bias = empty_parameter((rows,), torch.float32, device) if bias else None

    def placements(self) -> dict[str, Placement]:
        found = {f"{self.name}.weight": Placement(self.weight, tuple(self.weight.shape))}
        if self.bias is not None:
            found[f"{self.name}.bias"] = Placement(self.bias, tuple(self.bias.shape))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class Pooler(nn.Module):
    """`width`: values that `forward` returns for each vector."""

    def __init__(self, config: ModelConfig, tokenizer_dir: Path, device: torch.device) -> None:
        """Raises ModelConfigError where parts do not fit together, or a word of the answer is no token."""
        super().__init__()
        assert config.pooling is not None
        self.pooling, self.answers = config.pooling, None
        self.width = config.hidden_size
        self.head = nn.ModuleList()
        self.dense = nn.ModuleList(self._dense(layer, device) for layer in self.pooling.dense)
        if self.pooling.head == "yes_no":
            self.answers, self.width = answer_tokens(tokenizer_dir), 1
        elif self.pooling.head:
            names, activation = _HEADS[self.pooling.head]
            for name in names[:-1]:
                self.head.append(Linear(name, self.width, self.width, True, activation, device))
            bias = self.pooling.head != "score"
            self.head.append(Linear(names[-1], len(self.pooling.labels), self.width, bias, "none", device))
            self.width = len(self.pooling.labels)

    def _dense(self, layer: DenseLayer, device: torch.device) -> Linear:
        if layer.in_features != self.width:
            raise ModelConfigError(f"{layer.folder}/config.json: in_features is {layer.in_features}, and {self.width} "
                                   "values come in.")
        self.width = layer.out_features
        return Linear("linear", layer.out_features, layer.in_features, layer.bias, layer.activation, device)

    def load(self, path: Path, dummy: bool, seed: int = 0) -> int:
        """From the model's directory; returns bytes. Raises WeightError."""
        for part, directory in self._parts(path):
            source = DummySource(part.placements(), seed) if dummy else self._source(directory)
            load_weights(part, source)
        return sum(p.nbytes for p in self.parameters())

    def check(self, path: Path) -> None:
        """Raises the WeightError that `load` would raise of headers."""
        for part, directory in self._parts(path):
            check_weights(part, self._source(directory))

    def _parts(self, path: Path) -> list[tuple[Any, Path]]:
        """And where the weights of each are."""
        parts: list[tuple[Any, Path]] = [(_Part(self.head), path)] if self.head else []
        return parts + [(layer, path / config.folder) for layer, config in zip(self.dense, self.pooling.dense)]

    def _source(self, directory: Path) -> WeightSource:
        source = open_source(directory)
        if self.pooling.head == "bert":  # whose pooler has the prefix of the network
            theirs = checkpoint_prefix(source.tensors) + "pooler.dense"
            return RenamedSource(source, {name: name.replace(theirs, "bert.pooler.dense", 1)
                                          if name.startswith(theirs) else name for name in source.tensors})
        return source

    def forward(self, vectors: torch.Tensor, model: Any) -> torch.Tensor:
        """Pooled [S, hidden] -> [S, width] float32; all ranks of a tensor-parallel group call it together."""
        if self.answers is not None:
            no, yes = self.answers
            logits = model.compute_logits(vectors.to(model.dtype))
            return (logits[:, yes] - logits[:, no]).unsqueeze(1)
        vectors = vectors.float()
        for layer in (*self.dense, *self.head):
            vectors = layer(vectors)
        return vectors


class _Part:
    """Several layers of one checkpoint, for the loader."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers

    def placements(self) -> dict[str, Placement]:
        return {name: p for layer in self._layers for name, p in layer.placements().items()}  # type: ignore[operator]


def answer_tokens(tokenizer_dir: Path) -> tuple[int, int]:
    """Ids of "no" and "yes"."""
    from tokenizers import Tokenizer

    file = tokenizer_dir / "tokenizer.json"
    if not file.is_file():
        raise ModelConfigError(f"{file} does not exist; a reranker that answers yes or no needs it.")
    tokenizer = Tokenizer.from_file(str(file))
    no, yes = (tokenizer.token_to_id(word) for word in _ANSWERS)
    if no is None or yes is None:
        raise ModelConfigError(f'{file}: "no" and "yes" are no tokens, so this is no reranker that answers with them.')
    return no, yes
