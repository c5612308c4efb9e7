"""What one forward pass reads. Every tensor with its shape and dtype.

Letters: B sequences in the step, D of them decodes (one query token each, they come first), T query tokens in all,
M blocks in the longest block table, H query heads, K key/value heads, E head size, S positions whose logits are wanted.
Host mirrors (numpy) stand beside device tensors where an operator wants lengths on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

NO_SLOT = -1  # of a token without an adapter


@dataclass(slots=True)
class AttentionMetadata:
    """Which keys each query token sees. Filled by execution.input_builder; read by attention backends."""

    num_decodes: int  # D; rows 0..D-1 have exactly one query token
    num_prefills: int  # B - D; rows D..B-1 (any number of query tokens, cached prefix possible)
    query_start: torch.Tensor  # [B+1] int32: token offsets of the rows, cumulative
    seq_lens: torch.Tensor  # [B] int32: keys a row sees, its new tokens included
    block_table: torch.Tensor  # [B, M] int32; entries past a row's length are 0 (the dummy block)
    slot_mapping: torch.Tensor  # [T] int64, or what the backend asks for: block * block_size + offset of each K and V
    query_start_host: np.ndarray  # [B+1] int32
    seq_lens_host: np.ndarray  # [B] int32
    max_seq_len: int
    as_graph: bool = False  # a decode step that a graph runs: B and M are the graph's, padded rows are the dummy's


@dataclass(slots=True)
class ForwardInput:
    """Filled by execution.input_builder; read by models.

    Tokens may be padded to more than `attention` knows of, P instead of T, where what runs is captured in pieces.
    """

    token_ids: torch.Tensor  # [T] or [P] int64
    positions: torch.Tensor  # the same
    attention: AttentionMetadata
    dp_tokens: tuple[int, ...] = ()  # where data-parallel ranks step together: T of each of them; () otherwise
    lora_slots: torch.Tensor | None = None  # as token_ids: each token's adapter slot or -1; None: no token has one
