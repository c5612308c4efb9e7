"""A worker without a model: it keeps a KV memory of what was written where, and checks every read.

The "KV" of a position is the hash of the whole prefix up to it, so a wrong, stale or doubly owned block shows up as a
mismatch. The next token is a function of the prefix, so that tokens do not depend on how the work was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from xllm_npu.execution.step_message import PLACEHOLDER, StepInput
from xllm_npu.state.batch import StepResult


def mix(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 2 + 1442695040888963407) % (1 << 61)


def prefix_hash(tokens, second: bool = False) -> int:
    """`second`: with other rotary frequencies all keys are others."""
    state = int(second)
    for token in tokens:
        state = mix(state, int(token))
    return state


def next_token(state: int, vocab: int, salt: int) -> int:
    """`salt` tells sibling sequences apart (0 for the first)."""
    return mix(state, salt + 7) % vocab


def with_adapter(token: int, adapter: int) -> int:
    """An adapter makes other keys and values of every token."""
    return token + 1_000_003 * adapter


def expected_output(prompt, count: int, vocab: int, salt: int = 0, adapter: int = 0) -> list[int]:
    state, out = prefix_hash([with_adapter(int(token), adapter) for token in prompt]), []
    for _ in range(count):
        out.append(next_token(state, vocab, salt))
        state = mix(state, with_adapter(out[-1], adapter))
    return out


class ScriptedWorker:
    def __init__(
        self, num_blocks: int, block_size: int, max_rows: int, vocab: int = 1000,
        is_mapped: Callable[[int], bool] = lambda block: True,
    ) -> None:
        """`is_mapped`: whether a block's memory is there; what a step touches must be."""
        self.is_mapped = is_mapped
        self.block_size, self.vocab = block_size, vocab
        self.kv = np.full((num_blocks, block_size), -1, np.int64)
        self.last_token = np.full(max_rows, -1, np.int64)
        self.sequence_index = np.full(max_rows, -1, np.int64)
        self.second_rotation = np.zeros(max_rows, np.int64)
        self.lora_slot = np.full(max_rows, -1, np.int64)
        self.adapters: dict[int, int] = {}  # by slot
        self.unloaded: set[int] = set()
        self.steps = 0

    def execute(self, message: StepInput) -> StepResult:
        step: StepInput = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StepInput)
        self.steps += 1
        rows, start, new = step.array("rows"), step.array("start"), step.array("num_new")
        assert len(set(rows.tolist())) == rows.size, "a row is twice in the step"
        assert (new[: step.num_decodes] == 1).all()
        table = step.array("block_table").reshape(rows.size, step.table_width)
        tokens = step.array("tokens")
        assert tokens.size == new.sum()
        for row in step.released:
            self.sequence_index[row] = self.last_token[row] = -1
        for admission in step.admitted:
            self.sequence_index[admission.row] = admission.sequence_index
            self.second_rotation[admission.row] = admission.second_rotation
            self.lora_slot[admission.row] = admission.lora_slot
        for slot, adapter in step.lora_loads:
            assert adapter not in self.unloaded, f"adapter {adapter} is wanted, and unloaded"
            self.adapters[slot] = adapter
        for source, target in step.copies:
            assert self.is_mapped(source), f"block {source} is copied and has no memory"
            assert self.is_mapped(target), f"block {target} is copied to and has no memory"
            self.kv[target] = self.kv[source]
        state = self._forward(rows, start, new, table, tokens)
        out = [next_token(state[i], self.vocab, int(self.sequence_index[row]))
               for i, row in zip(step.array("sample_source"), step.array("sample_rows"))]
        self.last_token[step.array("sample_rows")] = out
        return StepResult(step_id=step.step_id, tokens=np.array(out, np.int32).tobytes(), seconds=1e-3)

    def _forward(self, rows, start, new, table, tokens) -> list[int]:
        """Write all KV of the step in position order (as layers do: every write before any read), then check reads."""
        offset, work = 0, []
        for i, row in enumerate(rows.tolist()):
            for j in range(new[i]):
                token = int(tokens[offset + j])
                if token == PLACEHOLDER:
                    token = int(self.last_token[row])
                    assert token >= 0, "a placeholder for a row that has sampled nothing"
                work.append((int(start[i]) + j, i, token))
            offset += int(new[i])
        written: dict[tuple[int, int], int] = {}
        state = [0] * rows.size
        for position, i, token in sorted(work):
            first = int(self.second_rotation[rows[i]])
            before = first if position == 0 else int(self.kv[self._slot(table[i], position - 1)])
            slot = self._slot(table[i], position)
            assert slot[0] != 0, "a live row writes the dummy block"
            assert slot not in written, f"two rows write slot {slot} in one step"
            lora_slot = int(self.lora_slot[rows[i]])
            state[i] = mix(before, with_adapter(token, self.adapters[lora_slot] if lora_slot >= 0 else 0))
            written[slot] = state[i]
            self.kv[slot] = state[i]
        return state

    def _slot(self, blocks, position: int) -> tuple[int, int]:
        block = int(blocks[position // self.block_size])
        assert self.is_mapped(block), f"block {block} has no memory"
        return block, position % self.block_size
