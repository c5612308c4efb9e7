"""The place where a forward pass can be taken apart: attention, whose work depends on more than the number of tokens.

What lies between two attentions has shapes that follow from the number of rows alone. A runner that wants attention
elsewhere than where the layers call it gives every layer an `AttentionCut`, which is called instead of `attend`. Knows
neither graphs nor backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class AttentionLayer(Protocol):
    """What a layer's attention is, without its projections."""

    @property
    def attended_width(self) -> int:
        """Values that `attend` gives for a row."""
        ...

    def attend(self, *rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] each, projected and rotated -> [T, attended_width]; T as the backend was prepared for."""
        ...


AttentionCut = Callable[..., torch.Tensor]  # (layer, *rows) -> [T, attended_width], as layer.attend(*rows)
