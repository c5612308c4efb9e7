"""From a step message to the tensors a model reads, in buffers that live as long as the worker.

Every step fills the beginning of the same buffers, so a captured graph reads its inputs where it was captured. On a
device with its own memory the host side is pinned and copied without waiting; there are two of it, used in turn, and
none is written before the copies from it have ended. On the CPU both sides are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from xllm_models.forward_input import NO_SLOT, AttentionMetadata, ForwardInput
from xllm_platform.base import Event

from xllm_npu.execution.step_message import StepInput

I32 = npt.NDArray[np.int32]
SIDES = 2  # of the host's buffers: one is filled while the device may still read the other


class DeviceBuffer:
    """A flat array on the host, twice, and its twin on the device."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> None:
        self._shared = device.type == "cpu"
        count = 1 if self._shared else SIDES
        self._sides = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(count)]
        self._hosts = [side.numpy() for side in self._sides]
        self.device = self._sides[0] if self._shared else torch.zeros(size, dtype=dtype, device=device)
        self._view = self.device[:0]  # what was sent last: a batch that decodes keeps its size for many steps
        self.turn(0)

    def turn(self, side: int) -> None:
        """`host` and `send` are of this side from now on; what it held stays there."""
        side %= len(self._sides)
        self.host_tensor, self.host = self._sides[side], self._hosts[side]

    def send(self, count: int) -> torch.Tensor:
        """The first `count` elements, on the device."""
        if self._view.shape[0] != count:
            self._view = self.device[:count]
        view = self._view
        if not self._shared:
            view.copy_(self.host_tensor[:count], non_blocking=True)
        return view


@dataclass(slots=True)
class BuiltStep:
    """B rows and T tokens, or the graph size that both were padded to; or T padded, which only `input` knows."""

    input: ForwardInput
    rows: I32  # [B]
    query_start: I32  # [B+1]
    sample_positions: I32  # [S] index into the T tokens
    sample_rows: I32  # [S]
    sample_output: I32  # [S]
    all_sampled_in_order: bool  # sample_positions is 0..B-1


class InputBuilder:
    def __init__(
        self, *, max_tokens: int, max_rows: int, max_blocks: int, block_size: int, device: torch.device, pinned: bool,
        two_rotations: bool = False, slot_dtype: torch.dtype = torch.int64,
        new_event: Callable[[], Event] | None = None, lora: bool = False,
    ) -> None:
        """`two_rotations`: the model wants position 2p, or 2p + 1 for rows admitted as such, instead of p.
        `lora`: rows may have adapters.

        `new_event` makes events of the device, which tell when a copy has ended; None: copies end at once.
        """
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.device = device
        tokens = max(max_tokens, max_rows)

        def buffer(size: int, dtype: torch.dtype) -> DeviceBuffer:
            return DeviceBuffer(size, dtype, device, pinned)

        self.token_ids = buffer(tokens, torch.int64)
        self.positions = buffer(tokens, torch.int64)
        self.slots = buffer(tokens, slot_dtype)
        self.query_start = buffer(max_rows + 1, torch.int32)
        self.seq_lens = buffer(max_rows, torch.int32)
        self.block_table = buffer(max_rows * max_blocks, torch.int32)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)  # sampled last, by table row
        self._last_token_host = self.last_token.numpy() if device.type == "cpu" else None
        self._second = np.zeros(max_rows, np.int32) if two_rotations else None  # by table row: 0 or 1
        self._lora_slot = np.full(max_rows, NO_SLOT, np.int64) if lora else None  # by table row
        self.lora_slots = buffer(tokens if lora else 0, torch.int64)
        self._arange = np.arange(tokens + 1, dtype=np.int32)
        self._buffers = (self.token_ids, self.positions, self.slots, self.query_start, self.seq_lens, self.block_table,
                         self.lora_slots)
        self._sent = [new_event() for _ in range(SIDES)] if new_event is not None else []
        self._step = 0

    def build(
        self, step: StepInput, graph_size: int = 0, padded_tokens: int = 0, lora: bool = False
    ) -> BuiltStep:
        """Fill the buffers, those of adapter slots where `lora`.

        `graph_size` > 0: a decode step padded to that many rows, with the full table width. `padded_tokens` > 0: so
        many tokens for the model, of which attention gets the step's own alone.
        """
        self._next_side()
        rows, start, new = step.array("rows"), step.array("start"), step.array("num_new")
        tokens = step.array("tokens")
        size, count = rows.size, tokens.size
        table = step.array("block_table").reshape(size, step.table_width)
        if count == size:
            positions, owner, query_start = start, self._arange[:size], self._arange[: size + 1]
        else:
            query_start = np.zeros(size + 1, np.int32)
            np.cumsum(new, out=query_start[1:])
            owner = np.repeat(self._arange[:size], new)
            positions = self._arange[:count] - np.repeat(query_start[:-1] - start, new)
        block, offset = np.divmod(positions, self.block_size)
        self.token_ids.host[:count] = tokens
        self.positions.host[:count] = positions if self._second is None else 2 * positions + self._second[rows][owner]
        self.slots.host[:count] = table[owner, block].astype(np.int64) * self.block_size + offset
        self.seq_lens.host[:size] = start + new
        self.query_start.host[: size + 1] = query_start
        if lora and self._lora_slot is not None:
            self.lora_slots.host[:count] = self._lora_slot[rows][owner]
            self.lora_slots.host[count : max(graph_size, padded_tokens)] = NO_SLOT
        if graph_size:
            width = self.max_blocks
            self._pad(size, graph_size)
            view = self.block_table.host[: graph_size * width].reshape(graph_size, width)
            view[:size, : step.table_width] = table
            view[size:] = 0
        else:
            width = step.table_width
            self.block_table.host[: size * width] = table.reshape(-1)
        padded = graph_size or size
        if padded_tokens:
            self._pad_tokens(count, padded_tokens)
        model_input = self._send(padded, graph_size or count, width, step.num_decodes if not graph_size else padded,
                                 padded_tokens, lora)
        model_input.attention.as_graph = graph_size > 0
        model_input.dp_tokens = tuple(graph_size or padded_tokens or there for there in step.dp_tokens)
        self._fill_placeholders(rows[: step.num_decodes], tokens[: step.num_decodes])
        source = step.array("sample_source")
        return BuiltStep(
            input=model_input, rows=rows, query_start=query_start, sample_positions=query_start[source + 1] - 1,
            sample_rows=step.array("sample_rows"), sample_output=step.array("sample_output"),
            all_sampled_in_order=count == size and source.size == size and step.num_decodes == size,
        )

    def admit(self, row: int, second_rotation: bool, lora_slot: int = NO_SLOT) -> None:
        if self._second is not None:
            self._second[row] = second_rotation
        if self._lora_slot is not None:
            self._lora_slot[row] = lora_slot

    @property
    def takes_lora(self) -> bool:
        return self._lora_slot is not None

    def has_lora(self, rows: I32) -> bool:
        """Whether one of the rows has an adapter."""
        return self._lora_slot is not None and bool((self._lora_slot[rows] != NO_SLOT).any())

    def graph_input(self, graph_size: int, dp_size: int, lora: bool = False) -> ForwardInput:
        """The input a graph of this size is captured with: padding only. `dp_size` ranks step together."""
        self._next_side()
        self.lora_slots.host[:graph_size] = NO_SLOT
        self._pad(0, graph_size)
        self.block_table.host[: graph_size * self.max_blocks] = 0
        model_input = self._send(graph_size, graph_size, self.max_blocks, graph_size, lora=lora)
        model_input.attention.as_graph = True
        model_input.dp_tokens = (graph_size,) * dp_size if dp_size > 1 else ()
        return model_input

    def pieces_input(self, tokens: int, dp_size: int, lora: bool = False) -> ForwardInput:
        """The input that pieces of `tokens` tokens are captured with; what it says of attention means nothing."""
        self._next_side()
        self._pad(0, 1)
        self._pad_tokens(0, tokens)
        self.lora_slots.host[:tokens] = NO_SLOT
        self.block_table.host[0] = 0
        model_input = self._send(1, 1, 1, 1, tokens, lora)
        model_input.dp_tokens = (tokens,) * dp_size if dp_size > 1 else ()
        return model_input

    def remember(self, rows: I32, tokens: torch.Tensor) -> None:
        """The tokens just sampled, [S] int64 on the device; placeholders of later steps stand for them."""
        if self._last_token_host is not None:
            self._last_token_host[rows] = tokens.numpy()
            return
        self.last_token[torch.from_numpy(rows.astype(np.int64)).to(self.device, non_blocking=True)] = tokens

    def _next_side(self) -> None:
        """The host's buffers of the step before the last, once the device has read them."""
        if self._last_token_host is not None:
            return  # one side
        self._step += 1
        if self._sent:
            self._sent[self._step % SIDES].synchronize()
        for buffer in self._buffers:
            buffer.turn(self._step % SIDES)

    def _pad(self, size: int, graph_size: int) -> None:
        """Rows that write their one token to the dummy block and see nothing but it."""
        self.token_ids.host[size:graph_size] = 0
        self.positions.host[size:graph_size] = 0
        self.slots.host[size:graph_size] = 0
        self.seq_lens.host[size:graph_size] = 1
        self.query_start.host[: graph_size + 1] = self._arange[: graph_size + 1]

    def _pad_tokens(self, count: int, padded: int) -> None:
        """Tokens that no attention sees; what they are must be a token's number and a position."""
        self.token_ids.host[count:padded] = 0
        self.positions.host[count:padded] = 0

    def _send(
        self, rows: int, tokens: int, width: int, num_decodes: int, padded_tokens: int = 0, lora: bool = False
    ) -> ForwardInput:
        seq_lens_host = self.seq_lens.host[:rows]
        metadata = AttentionMetadata(
            num_decodes=num_decodes, num_prefills=rows - num_decodes,
            query_start=self.query_start.send(rows + 1), seq_lens=self.seq_lens.send(rows),
            block_table=self.block_table.send(rows * width).view(rows, width), slot_mapping=self.slots.send(tokens),
            query_start_host=self.query_start.host[: rows + 1], seq_lens_host=seq_lens_host,
            max_seq_len=int(seq_lens_host.max()),
        )
        seen = padded_tokens or tokens
        model_input = ForwardInput(self.token_ids.send(seen), self.positions.send(seen), metadata,
                                   lora_slots=self.lora_slots.send(seen) if lora else None)
        if self._sent:
            self._sent[self._step % SIDES].record()
        return model_input

    def _fill_placeholders(self, rows: I32, tokens: I32) -> None:
        """Decode tokens that the scheduler does not know yet are what this worker sampled last for the row."""
        if not rows.size or tokens.min() >= 0:
            return
        if self._last_token_host is not None:  # numpy does this in a fifth of the time that torch's calls take
            self.token_ids.host[: rows.size] = np.where(tokens < 0, self._last_token_host[rows], tokens)
            return
        view = self.token_ids.device[: rows.size]
        index = torch.from_numpy(rows.astype(np.int64)).to(self.device, non_blocking=True)
        view.copy_(torch.where(view < 0, self.last_token[index], view))
