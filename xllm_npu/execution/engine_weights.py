"""The weights of all ranks of an engine: another checkpoint is checked on all of them, and loaded on all or none.

Rank 0 does its part in this process, the others are told through the stream of steps and answer with their reports. A
rank that fails to load leaves weights that nobody can use; so all load the old ones again then, and an engine that
cannot do that either must end. Steps that are in flight end first.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Protocol

from xllm_npu.execution.child import describe
from xllm_npu.execution.weight_update import WeightsRefused
from xllm_npu.execution.worker_messages import WorkerCheckWeights, WorkerLoadWeights

log = logging.getLogger(__name__)


class LoadFailed(RuntimeError):
    """A rank could not load the checkpoint; all have the old weights again. The message says why."""


class WeightsLost(RuntimeError):
    """Neither the new weights nor the old ones could be loaded. Fatal."""


class Checker(Protocol):
    def check(self, checkpoint: str) -> None:
        """Raises WeightsRefused."""
        ...


class Loader(Protocol):
    def load_weights(self, checkpoint: str) -> None:
        """Raises whatever goes wrong, or how another rank died."""
        ...


class OtherRanks(Protocol):
    """What this needs of `WorkerGroup`."""

    def ask(self, message: WorkerCheckWeights | WorkerLoadWeights) -> None:
        """Tell all of them, one thing after the other."""
        ...

    def answers(self) -> list[str]:
        """What went wrong on those where something did, once all have answered. Raises how one died."""
        ...


class EngineWeights:
    def __init__(self, checker: Checker, worker: Loader, others: OtherRanks | None, checkpoint: str) -> None:
        """`checker` and `worker`: rank 0. `checkpoint`: what is loaded now."""
        self._checker, self._worker, self._others = checker, worker, others
        self.checkpoint = checkpoint

    def check(self, checkpoint: str) -> Future[None]:
        """Whether all ranks could load it; beside steps, on a thread. The future raises WeightsRefused, or how a rank
        died.
        """
        if self._others is not None:
            self._others.ask(WorkerCheckWeights(checkpoint))
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()

        def work() -> None:
            try:
                self._check(checkpoint)
            except BaseException as error:  # raised where the result is asked for
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=work, name="check-weights", daemon=True).start()
        return done

    def _check(self, checkpoint: str) -> None:
        failure: WeightsRefused | None = None
        try:
            self._checker.check(checkpoint)
        except WeightsRefused as error:
            failure = error
        failed = [] if self._others is None else self._others.answers()
        if failure is not None:
            raise failure
        if failed:
            raise WeightsRefused(failed[0])

    def load(self, checkpoint: str) -> None:
        """No request has a KV block, and what was computed with the old weights is forgotten.

        Raises LoadFailed, and all ranks have the old weights; or what is fatal.
        """
        failure = self._load(checkpoint)
        if failure:
            log.error("loading %s failed, and the old weights are loaded again: %s", checkpoint, failure)
            lost = self._load(self.checkpoint)
            if lost:
                log.error("the old weights cannot be loaded either: %s", lost)
                raise WeightsLost("Other weights could not be loaded, nor the old ones again; the log says why.")
            raise LoadFailed(failure)
        self.checkpoint = checkpoint

    def _load(self, checkpoint: str) -> str:
        """What went wrong, if something did. Raises how a rank died."""
        if self._others is not None:
            self._others.ask(WorkerLoadWeights(checkpoint))
        failures: list[str] = []
        try:
            self._worker.load_weights(checkpoint)
        except Exception as error:
            log.debug("the weights cannot be loaded", exc_info=True)
            failures.append(describe(error))
        if self._others is not None:
            failures += self._others.answers()
        return failures[0] if failures else ""
