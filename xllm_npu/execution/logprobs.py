"""Log probabilities of the model's own distribution: before any processor, temperature or filter.

For each position: the chosen token, the k most likely, then those asked for by id, each with its rank (1 is
the most likely; tied tokens share the better rank). Computed on the device as `DeviceLogprobs`, read back
once by `to_host`. Knows no sampling parameters; the sampler says how many and which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xllm_npu.execution.sampling_state import Int32Array, Int64Array, to_device
from xllm_npu.state.messages import Logprobs

_NO_IDS = np.zeros(0, np.int64)


@dataclass(slots=True)
class SampleLogprobs:
    """On the host. R positions, W = 1 + widest k + most ids asked for; unused columns are -1, 0.0, 0."""

    rows: Int32Array  # [R] batch-table rows (prompt positions: offsets in the chunk)
    token_ids: Int32Array  # [R, W]: chosen, then top k, then asked for
    logprobs: npt.NDArray[np.float32]  # [R, W]
    ranks: Int32Array  # [R, W]
    counts: Int32Array  # [R] columns in use, which come first

    def entry(self, i: int) -> Logprobs:
        """Position i (0..R-1) as it goes to the client."""
        n = int(self.counts[i])
        return Logprobs(
            self.token_ids[i, :n].tolist(), self.logprobs[i, :n].tolist(), self.ranks[i, :n].tolist()
        )

    def by_row(self) -> dict[int, Logprobs]:
        return {row: self.entry(i) for i, row in enumerate(self.rows.tolist())}


@dataclass(slots=True)
class DeviceLogprobs:
    """The same on the device, with every row as wide as the widest."""

    rows: Int32Array  # [R]
    num_top: Int64Array  # [R] how many of the top columns a row asked for
    num_asked: Int64Array  # [R]
    widest_top: int
    token_ids: torch.Tensor  # [R, 1 + widest_top + widest asked] int64
    logprobs: torch.Tensor  # the same shape, float32
    ranks: torch.Tensor  # the same shape, int32

    def to_host(self) -> SampleLogprobs:
        """Waits for the device. Moves each row's used columns to the front."""
        ids = self.token_ids.cpu().numpy().astype(np.int32)
        column = np.arange(ids.shape[1])
        asked = column - 1 - self.widest_top  # index among the asked-for, negative before them
        used = np.where(asked < 0, column <= self.num_top[:, None], asked < self.num_asked[:, None])  # [R, W]
        order = np.argsort(~used, axis=1, kind="stable")
        used = np.take_along_axis(used, order, 1)

        def compact(values: np.ndarray, unused: float) -> np.ndarray:
            return np.where(used, np.take_along_axis(values, order, 1), np.asarray(unused, values.dtype))

        return SampleLogprobs(
            rows=self.rows,
            token_ids=compact(ids, -1),
            logprobs=compact(self.logprobs.cpu().numpy(), 0.0),
            ranks=compact(self.ranks.cpu().numpy(), 0),
            counts=(1 + self.num_top + self.num_asked).astype(np.int32),
        )


def measure(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    rows: Int32Array,
    num_top: Int64Array,
    asked: Sequence[Int64Array],
) -> DeviceLogprobs:
    """Raw `logits` [R, V] float32 and the `chosen` [R] int64 tokens -> log probabilities; the rest one for
    each row.
    """
    widest = min(int(num_top.max(initial=0)), logits.shape[1])
    num_asked = np.array([len(x) for x in asked], np.int64)
    listed = np.zeros((len(asked), int(num_asked.max(initial=0))), np.int64)
    for row, ids in zip(listed, asked):
        row[: len(ids)] = ids
    listed_ids = torch.cat([chosen.unsqueeze(1), to_device(listed, logits.device)], 1)  # [R, 1+A]
    listed_values = logits.gather(1, listed_ids)  # [R, 1+A]
    # One pass over the vocabulary for each listed token; a rank needs no sort.
    above = [(logits > listed_values[:, i : i + 1]).sum(1) for i in range(listed_ids.shape[1])]
    listed_ranks = torch.stack(above, 1) + 1
    top_values, top_ids = logits.topk(widest, dim=1)  # [R, k]
    top_ranks = (top_values.unsqueeze(1) > top_values.unsqueeze(2)).sum(2) + 1

    def columns(listed: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return torch.cat([listed[:, :1], top, listed[:, 1:]], 1)

    return DeviceLogprobs(
        rows=rows,
        num_top=np.minimum(num_top, widest),
        num_asked=num_asked,
        widest_top=widest,
        token_ids=columns(listed_ids, top_ids),
        logprobs=columns(listed_values, top_values) - logits.logsumexp(1, keepdim=True),
        ranks=columns(listed_ranks, top_ranks).to(torch.int32),
    )


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: Int32Array, num_top: int, token_ids: Int64Array = _NO_IDS
) -> SampleLogprobs:
    """Log probabilities of prompt tokens. `logits` [C, V] float32 of C consecutive prompt positions, raw;
    `next_token_ids` [C]: the prompt token that follows each. Row i of the result belongs to
    next_token_ids[i].
    """
    count = len(next_token_ids)
    chosen = to_device(next_token_ids.astype(np.int64), logits.device)
    tops = np.full(count, num_top, np.int64)
    return measure(logits, chosen, np.arange(count, dtype=np.int32), tops, [token_ids] * count).to_host()
