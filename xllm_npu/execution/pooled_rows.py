"""Which of a step's hidden states become a request's vector: the last position's, the first's, a mean, a maximum.

Prompts may come in chunks. What has been seen of a row's prompt is kept on the device until its last chunk; a row that
begins again, after a preemption or for another request, begins at position 0. `pool_plainly` is the plain form.
"""

from __future__ import annotations

import numpy as np
import torch
from xllm_models.pooler import Pooler

from xllm_npu.execution.input_builder import BuiltStep
from xllm_npu.execution.step_message import StepInput


class PooledRows:
    def __init__(self, pooler: Pooler, max_rows: int, hidden_size: int, device: torch.device) -> None:
        self.pooler, self.kind = pooler, pooler.pooling.pooling
        self._seen = None  # [max_rows, hidden] float32: sum, maximum or first of the chunks so far
        if self.kind != "last":
            self._seen = torch.zeros(max_rows, hidden_size, dtype=torch.float32, device=device)

    def pool(self, step: StepInput, built: BuiltStep, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [T, hidden] -> [S, hidden] of the prompts that end in this step; None: none does."""
        source = step.array("sample_source")
        if step.num_decodes:  # the step of a rank without work, which has no rows
            return None
        if self._seen is None:
            return None if not source.size else hidden[_index(built.sample_positions, hidden)]
        rows = self._take(step, built, hidden, self._seen)
        if not source.size:
            return None
        pooled = self._seen[rows][_index(source, hidden)]
        if self.kind != "mean":
            return pooled
        lengths = (step.array("start") + step.array("num_new"))[source]
        return pooled / torch.from_numpy(lengths.astype(np.float32)).to(pooled.device).unsqueeze(1)

    def _take(self, step: StepInput, built: BuiltStep, hidden: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Add this step's positions to what has been seen; returns the rows, [B]."""
        rows, start = _index(step.array("rows"), hidden), step.array("start")
        fresh = torch.from_numpy(start == 0).to(hidden.device).unsqueeze(1)
        begin = built.query_start
        if self.kind == "cls":
            part = hidden[_index(begin[:-1], hidden)].float()
            seen[rows] = torch.where(fresh, part, seen[rows])
            return rows
        if self.kind == "mean":
            owner = np.repeat(np.arange(rows.shape[0]), np.diff(begin))
            part = torch.zeros(rows.shape[0], hidden.shape[1], dtype=torch.float32, device=hidden.device)
            part.index_add_(0, _index(owner, hidden), hidden[: owner.size].float())
            seen[rows] = part + seen[rows].masked_fill(fresh, 0)
            return rows
        part = torch.stack([hidden[b:e].amax(0) for b, e in zip(begin[:-1].tolist(), begin[1:].tolist())]).float()
        seen[rows] = torch.maximum(part, seen[rows].masked_fill(fresh, float("-inf")))
        return rows


def pool_plainly(kind: str, hidden: torch.Tensor) -> torch.Tensor:
    """One whole prompt's [n, hidden] -> [hidden]."""
    if kind == "mean":
        return hidden.float().mean(0)
    if kind == "max":
        return hidden.float().amax(0)
    return hidden[-1 if kind == "last" else 0].float()


def _index(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(like.device, non_blocking=True)
