"""A decode step's inputs as the kernel makes them on the emulated device, against what InputBuilder makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xllm_kernels_npu.decode_input import decode_input, decode_input_reference

from xllm_npu.execution.input_builder import BuiltStep, InputBuilder
from xllm_npu.execution.step_message import StepInput

pytestmark = pytest.mark.npu_lab

MAX_ROWS = 40


def on_host(
    arrays: dict[str, np.ndarray], last: torch.Tensor, block_size: int, padded: int, second: np.ndarray | None
) -> BuiltStep:
    """The step that InputBuilder builds on the CPU."""
    table = arrays["block_table"]
    builder = InputBuilder(
        max_tokens=MAX_ROWS, max_rows=MAX_ROWS, max_blocks=table.shape[1], block_size=block_size,
        device=torch.device("cpu"), pinned=False, two_rotations=second is not None)
    builder.last_token.copy_(last)
    for row, is_second in enumerate([] if second is None else second.tolist()):
        builder.admit(row, bool(is_second))
    count = len(arrays["rows"])
    nothing = np.zeros(0, np.int32)
    fields = {**arrays, "num_new": np.ones(count, np.int32), "sample_source": nothing, "sample_rows": nothing,
              "sample_output": nothing}
    return builder.build(step_input(fields, table.shape[1], count), padded)


def step_input(fields: dict[str, np.ndarray], width: int, num_decodes: int) -> StepInput:
    packed = {name: array.astype(np.int32).tobytes() for name, array in fields.items()}
    return StepInput(step_id=0, **packed, table_width=width, num_decodes=num_decodes)


@pytest.mark.parametrize("two_rotations", [False, True])
@pytest.mark.parametrize(("count", "padded", "block_size"), [(1, 1, 16), (5, 8, 128), (33, 40, 16), (40, 40, 128)])
def test_inputs(device: torch.device, count: int, padded: int, block_size: int, two_rotations: bool) -> None:
    width = 5
    arrays = {
        "rows": np.random.permutation(MAX_ROWS)[:count], "tokens": np.random.randint(-1, 3, count),
        "start": np.random.randint(0, width * block_size, count),
        "block_table": np.random.randint(0, 1 << 20, (count, width))}
    arrays["tokens"][0] = -1
    arrays["start"][-1] = block_size - 1  # the last slot of a block
    last = torch.randint(0, 1 << 18, (MAX_ROWS,))
    second = np.random.randint(0, 2, MAX_ROWS) if two_rotations else None
    wanted = on_host(arrays, last, block_size, padded, second).input
    tensors = [torch.from_numpy(arrays[name].astype(np.int32)).to(device)
               for name in ("tokens", "rows", "start", "block_table")]
    turn = None if second is None else torch.from_numpy(second.astype(np.int32)).to(device)
    made = decode_input(*tensors, last.to(device), block_size, padded, turn)
    host = (wanted.token_ids, wanted.positions, wanted.attention.seq_lens, wanted.attention.slot_mapping)
    reference = decode_input_reference(*(one.cpu() for one in tensors), last, block_size, padded,
                                       None if turn is None else turn.cpu())
    for one, built, plain in zip(made, host, reference, strict=True):
        assert torch.equal(one.cpu(), built)
        assert torch.equal(plain, built)


def test_padding_alone(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    last = torch.ones(4, dtype=torch.int64, device=device)
    made = decode_input(none, none, none, torch.zeros(0, 3, dtype=torch.int32, device=device), last, 128, 2)
    assert [one.tolist() for one in made] == [[0, 0], [0, 0], [1, 1], [0, 0]]


def test_a_captured_launch_reads_the_tokens_of_its_replay(device: torch.device) -> None:
    tokens, rows, start = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([-1], [3], [130]))
    table = torch.tensor([[7, 9]], dtype=torch.int32, device=device)
    last = torch.zeros(4, dtype=torch.int64, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        made = decode_input(tokens, rows, start, table, last, 128, 1)
    for token in (11, 12):
        last[3] = token
        graph.replay()
        assert [one.tolist() for one in made] == [[token], [130], [131], [9 * 128 + 2]]
