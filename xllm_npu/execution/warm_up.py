"""A prompt and a decode on the dummy block before the first request, so that none pays for first-time compilation."""

from __future__ import annotations

import numpy as np
from xllm_models.attention.base import PagedBackend

from xllm_npu.execution.load_plan import StepShape
from xllm_npu.execution.step_message import StepInput
from xllm_npu.execution.worker import Worker
from xllm_npu.state.batch import RowAdmission
from xllm_npu.state.sampling_params import SamplingParams

WARM_UP_TOKENS = 256


def warm_up(worker: Worker, attention: PagedBackend, shape: StepShape) -> None:
    """All ranks of a world call it together."""
    attention.warmup()
    length = max(1, min(shape.max_tokens, shape.max_model_len - 2, WARM_UP_TOKENS))
    width = length // shape.block_size + 1
    dp_size = worker.parts.parallel.dp.size
    steps = ((True, 0, length), (False, length, 1))
    for admit, start, count in steps if worker.parts.pooled is None else steps[:1]:  # vectors come without decodes
        step = warm_up_step(admit, start, count, width)
        if dp_size > 1:
            step.dp_tokens, step.dp_all_decode = [count] * dp_size, count == 1
        worker.execute(step)


def warm_up_step(admit: bool, start: int, count: int, width: int) -> StepInput:
    """`count` tokens of one row whose blocks are all the dummy."""

    def i32(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    params = SamplingParams(temperature=0.0, ignore_eos=True)
    admitted = [RowAdmission(row=0, sequence_index=0, params=params, stop_ids=[])] if admit else []
    return StepInput(
        step_id=-1, num_decodes=int(count == 1), rows=i32(0), start=i32(start), num_new=i32(count),
        tokens=i32(*[0] * count), block_table=i32(*[0] * width), table_width=width, sample_source=i32(0),
        sample_rows=i32(0), sample_output=i32(0), admitted=admitted, released=[] if admit else [0],
    )
