"""Steps in pieces on the CPU, by graphs that run again what they captured: cuts, padding, which steps they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from xllm_platform.base import Cut, Graph, GraphBackend

from tests.support.paged_model import PagedModel
from tests.support.tiny_model import make_tiny_model
from xllm_npu.execution.executor import EagerRunner, Executor, StepPlan
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.piecewise_runner import PiecewiseRunner
from xllm_npu.execution.step_message import PLACEHOLDER, StepInput

BLOCK, WIDTH = 16, 4
Call = Callable[[Sequence[torch.Tensor]], None]


class Repeated(Graph):
    """Runs everything again, and the calls where they stand."""

    def __init__(self, run: Callable[[Cut], torch.Tensor]) -> None:
        self._run, self.calls = run, 0

    def replay(self) -> torch.Tensor:
        def between(call: Call, tensors: Sequence[torch.Tensor]) -> None:
            self.calls += 1
            call(tensors)

        return self._run(between)


class Repeating(GraphBackend):
    def __init__(self) -> None:
        self.rows: list[Repeated] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        raise NotImplementedError

    def capture_pieces(self, run: Callable[[Cut], torch.Tensor]) -> Graph:
        run(lambda call, tensors: None)
        self.rows.append(Repeated(run))
        return self.rows[-1]


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def step(rows: list[tuple[int, list[int]]], decodes: int = 0, **more: object) -> StepInput:
    """rows of (tokens that are cached, new ones); row r has blocks WIDTH * r + 1 and following."""
    tables = [WIDTH * row + 1 + i for row in range(len(rows)) for i in range(WIDTH)]
    return StepInput(
        step_id=0, num_decodes=decodes, rows=i32(*range(len(rows))), start=i32(*(start for start, _ in rows)),
        num_new=i32(*(len(new) for _, new in rows)), tokens=i32(*(token for _, new in rows for token in new)),
        block_table=i32(*tables), table_width=WIDTH, sample_source=i32(*range(len(rows))),
        sample_rows=i32(*range(len(rows))), sample_output=i32(*[0] * len(rows)), **more)


def builder() -> InputBuilder:
    return InputBuilder(max_tokens=64, max_rows=8, max_blocks=WIDTH, block_size=BLOCK, device=torch.device("cpu"),
                        pinned=False)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 200, count).tolist()


STEPS = [step([(0, tokens(3, 0)), (0, tokens(11, 1))]), step([(3, tokens(1, 2)), (11, tokens(20, 3))], 1),
         step([(4, tokens(1, 4)), (31, tokens(1, 5))], 2), step([(5, tokens(2, 6)), (32, tokens(30, 7))])]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_pieces_compute_what_the_eager_runner_does(tmp_path, architecture: str) -> None:
    """Sizes 16 and 32, prefixes in the cache, decodes beside prompts; and not a block is written but the step's."""
    directory = make_tiny_model(tmp_path / "model", architecture, **({"sliding_window": 24} if architecture == "mistral"
                                                                     else {}))
    eager, pieces = (PagedModel(directory, kernels="torch", attention="torch") for _ in range(2))
    backend, inputs = Repeating(), builder()
    with torch.inference_mode():
        runner = PiecewiseRunner(backend, pieces.model, pieces.backend, 32)
        runner.capture([16, 32], inputs, lambda done, total: None)
        assert runner.sizes == [16, 32]
        for one in STEPS:
            size = runner.bucket(len(one.tokens) // 4)
            assert size is not None
            wanted = EagerRunner(eager.model, eager.backend).run(inputs.build(one).input)
            found = runner.run(inputs.build(one, padded_tokens=size).input)
            assert found.shape[0] == size
            torch.testing.assert_close(found[: wanted.shape[0]], wanted, rtol=1e-4, atol=1e-5)
    assert sum(row.calls for row in backend.rows) == len(STEPS) * len(eager.model.layers)
    for ours, theirs in zip(caches(pieces), caches(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
        assert not ours[0].any(), "padded tokens wrote to the dummy block"


def caches(model: PagedModel) -> list[torch.Tensor]:
    backend = model.backend
    return backend.caches if hasattr(backend, "caches") else [*backend.key_caches, *backend.value_caches]


def test_padding_is_a_token_and_a_position() -> None:
    """Placeholders of a step before, which stand for no token, must not be left in what is padded."""
    inputs = builder()
    decodes = step([(40, [PLACEHOLDER])] * 6, 6)
    inputs.build(decodes)
    built = inputs.build(step([(0, [7, 8])]), padded_tokens=8)
    assert built.input.token_ids.tolist() == [7, 8, *[0] * 6]
    assert built.input.positions.tolist() == [0, 1, *[0] * 6]
    assert built.input.attention.slot_mapping.tolist() == [BLOCK, BLOCK + 1]
    assert built.input.attention.query_start_host.tolist() == [0, 2]
    assert not built.input.attention.as_graph


def executor(decode: list[int], prefill: list[int]) -> Executor:
    """Of runners that only know their sizes."""
    def runner(kind: type, sizes: list[int]) -> PiecewiseRunner:
        found = object.__new__(kind)
        found.sizes = sizes
        return found

    from xllm_npu.execution.graph_runner import GraphRunner

    return Executor(SimpleNamespace(), runner(GraphRunner, decode) if decode else None,  # type: ignore[arg-type]
                    runner(PiecewiseRunner, prefill) if prefill else None)


PROMPT, DECODES = step([(0, tokens(20, 1))]), step([(3, [1]), (4, [2])], 2)
MIXED = step([(3, [1]), (0, tokens(40, 2))], 1)


@pytest.mark.parametrize(("one", "plan"), [
    (DECODES, StepPlan(graph_size=2)), (PROMPT, StepPlan(padded_tokens=32)), (MIXED, StepPlan(padded_tokens=48)),
    (step([(0, tokens(49, 1))]), StepPlan())])
def test_which_steps_run_in_pieces(one: StepInput, plan: StepPlan) -> None:
    chosen = executor([2], [32, 48])
    assert chosen.plan(one) == plan
    assert chosen.misses.prefill == (plan == StepPlan())
    assert chosen.misses.decode == 0
    without = executor([2], [])
    assert without.plan(one) == (plan if plan.graph_size else StepPlan())
    assert without.misses.prefill == 0


def test_a_batch_of_decodes_above_the_largest_graph_does_not_run_in_pieces() -> None:
    chosen = executor([1], [32])
    assert chosen.plan(DECODES) == StepPlan()
    assert (chosen.misses.decode, chosen.misses.prefill) == (1, 0)


@pytest.mark.parametrize(("counts", "all_decode", "plan"), [
    ([2, 30], False, StepPlan(padded_tokens=32)), ([2, 2], True, StepPlan(graph_size=2)),
    ([2, 49], False, StepPlan())])
def test_ranks_that_step_together_take_the_size_of_the_largest(
    counts: list[int], all_decode: bool, plan: StepPlan
) -> None:
    """This rank only decodes two rows."""
    together = step([(3, [1]), (4, [2])], 2, dp_tokens=counts, dp_all_decode=all_decode)
    assert executor([2, 64], [32, 48]).plan(together) == plan
    if plan.padded_tokens:
        assert builder().build(together, 0, plan.padded_tokens).input.dp_tokens == (32, 32)
