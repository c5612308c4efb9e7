"""The heartbeat of a data-parallel rank whose layers exchange tokens with the other ranks: all step together.

Before each step the ranks agree (step_agreement.py); with overlap, while the step before runs. In a wave every rank
submits the same number of steps: one that has nothing to schedule runs an empty step, a token on the dummy block whose
result nobody reads. When no rank has anything to schedule, none submits, and all collect what is in flight.

A rank that pauses says that it has no work, and runs along until all have paused and the wave is over. It may sleep
then, and still takes turns; whoever started the ranks tells none to sleep before all have paused, and none to resume
before all have their memory, so that no turn of a sleeping rank comes to a step. Resuming starts a wave as requests do.
"""

from __future__ import annotations

from collections import deque

from xllm_npu.execution.engine import Engine
from xllm_npu.master.engine_loop import PREPARING_PAUSE, EngineLoop
from xllm_npu.master.engine_residency import EngineResidency
from xllm_npu.master.step_agreement import Agreed, StepAgreement
from xllm_npu.master.step_exchange import StepExchange
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.batch import BatchGroup, empty_step
from xllm_npu.state.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    ResidencyMessage,
    StepOutputs,
    StepTogether,
)


class CoupledLoop(EngineLoop):
    def __init__(
        self, scheduler: Scheduler, engine: Engine, ready: EngineReady, *, overlap: bool, rank: int,
        exchange: StepExchange,
    ) -> None:
        super().__init__(scheduler, engine, ready, overlap=overlap)
        self._agreement = StepAgreement(rank)
        self._exchange = exchange
        self._empty = empty_step()
        self._in_flight: deque[bool] = deque()  # steps submitted and not collected: is it the scheduler's?
        self.residency = EngineResidency(scheduler, engine, self._settled, self._agreement.on_request)

    def submit(self, message: AddRequest | AbortRequest | StepTogether | ResidencyMessage) -> None:
        if isinstance(message, StepTogether):
            self._agreement.on_total(message.total_sent)
            return
        if isinstance(message, AddRequest):
            self._agreement.on_request()
        super().submit(message)

    def has_work(self) -> bool:
        """A turn is due: for this rank or for another one."""
        return self._agreement.active

    def _settled(self) -> bool:
        return not self._agreement.active and not self._in_flight

    def step(self) -> StepOutputs | None:
        """One turn, which waits for all ranks to take theirs. Raises StepError, and what a worker raised."""
        self._take_prepared()
        group = self.scheduler.schedule()
        agreed = self._agree(group)
        if not agreed.tokens:
            self._take_prepared(PREPARING_PAUSE)
        if agreed.over:
            assert not self._in_flight or self._agreement.left
            return self.scheduler.pending_outputs()
        if agreed.tokens:
            step = group or self._empty
            step.dp_tokens, step.dp_all_decode = agreed.tokens, agreed.all_decode
            self._engine.submit(step)
            self._in_flight.append(group is not None)
        if len(self._in_flight) > self._depth or (self._in_flight and not agreed.tokens):
            return self._collect()
        return self.scheduler.pending_outputs()

    def _agree(self, group: BatchGroup | None) -> Agreed:
        num_tokens, only_decodes = 0, True
        if group is not None:
            batch = group.batches[0]
            num_tokens, only_decodes = batch.num_tokens, batch.num_decodes == batch.rows.size
        own = self._agreement.numbers(num_tokens, only_decodes, self.scheduler.has_work)
        return self._agreement.decide(self._exchange.exchange(own))

    def _collect(self) -> StepOutputs | None:
        result = self._engine.collect()
        return self.scheduler.process(result) if self._in_flight.popleft() else self.scheduler.pending_outputs()

    def close(self) -> None:
        """Let the other ranks go, wait for the steps in flight, end the workers."""
        self._exchange.leave(self._agreement.leave())
        self.scheduler.abort_all()
        while self._in_flight:  # all ranks have agreed to them
            self._engine.collect()
            self._in_flight.popleft()
        self.scheduler.close()
        self._engine.close()
        self._exchange.close()
