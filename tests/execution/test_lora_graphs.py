"""Graphs where rows may have adapters: each size twice, and every row's slot in the buffer that the graph reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from xllm_models.forward_input import NO_SLOT, ForwardInput

from xllm_npu.execution.executor import EagerRunner, Executor
from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.step_message import StepInput


class Model:
    """Its result is what it was told of adapters."""

    def __call__(self, model_input: ForwardInput) -> torch.Tensor:
        if model_input.lora_slots is None:
            return torch.full((model_input.token_ids.shape[0],), -9)
        return model_input.lora_slots.clone()


class Backend:
    """A graph runs again what it captured."""

    tasks = None

    def __init__(self) -> None:
        self.captured = 0

    def prepare_model(self, model: object) -> None:
        pass

    def capture(self, run: Any) -> Any:
        self.captured += 1
        run()
        return SimpleNamespace(replay=run)


def runner(lora: bool) -> tuple[Executor, InputBuilder, Backend]:
    attention: Any = SimpleNamespace(prepare=lambda metadata: None, graph_tasks=None)
    builder = InputBuilder(max_tokens=16, max_rows=8, max_blocks=4, block_size=4, device=torch.device("cpu"),
                           pinned=False, lora=lora)
    backend: Any = Backend()
    model: Any = Model()
    graphs = GraphRunner(backend, model, attention)
    graphs.capture([2, 4], builder, lambda done, total: None)
    return Executor(EagerRunner(model, attention), graphs), builder, backend


def step(rows: list[int], new: list[int]) -> StepInput:
    def i32(values: list[int]) -> bytes:
        return np.array(values, np.int32).tobytes()

    decodes = sum(count == 1 for count in new)
    return StepInput(step_id=0, num_decodes=decodes, rows=i32(rows), start=i32([0] * len(rows)),
                     num_new=i32(new), tokens=i32([1] * sum(new)), block_table=i32([1] * len(rows)), table_width=1,
                     sample_source=i32([]), sample_rows=i32([]), sample_output=i32([]))


def run(executor: Executor, builder: InputBuilder, message: StepInput) -> list[int]:
    plan = executor.plan(message, builder.has_lora(message.array("rows")))
    built = builder.build(message, plan.graph_size, plan.padded_tokens, plan.lora)
    return executor.run(built.input, plan).tolist()


def test_each_size_is_captured_with_adapters_and_without():
    executor, builder, backend = runner(lora=True)
    assert backend.captured == 4
    builder.admit(5, False, 1)
    builder.admit(3, False, 0)
    builder.admit(2, False)
    assert run(executor, builder, step([5, 2, 3], [1, 1, 1])) == [1, NO_SLOT, 0, NO_SLOT]  # padded to 4
    assert run(executor, builder, step([5], [1])) == [1, NO_SLOT]
    assert run(executor, builder, step([2], [1])) == [-9, -9]  # no row has one: the other graph
    builder.admit(5, False)  # another sequence has the row now
    assert run(executor, builder, step([5], [1])) == [-9, -9]


def test_prompts_name_the_slot_of_every_token():
    executor, builder, _ = runner(lora=True)
    builder.admit(1, False, 2)
    assert run(executor, builder, step([0, 1, 4], [1, 3, 2])) == [NO_SLOT, 2, 2, 2, NO_SLOT, NO_SLOT]


@pytest.mark.parametrize("slot", [NO_SLOT, 3])
def test_without_adapters_nothing_is_captured_twice(slot):
    executor, builder, backend = runner(lora=False)
    builder.admit(1, False, slot)
    assert backend.captured == 2
    assert run(executor, builder, step([1], [1])) == [-9, -9]
