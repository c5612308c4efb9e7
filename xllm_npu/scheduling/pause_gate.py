"""What a pause lets through: nothing, or only what was there before it. Held back is who must wait for its end.

Knows the sequences that lead requests; who runs and who waits is the scheduler's.
"""

from __future__ import annotations

from xllm_npu.state.messages import AddRequest
from xllm_npu.state.request import NO_ROW, Sequence, SequenceState


class PauseGate:
    def __init__(self) -> None:
        self._closed = self._lets_finish = False
        self.held: dict[Sequence, None] = {}  # one for each request that came too late to finish; in their order

    def close(self, lets_finish: bool) -> None:
        self._closed, self._lets_finish = True, lets_finish

    def open(self) -> list[Sequence]:
        """The pause is over; who has waited for that."""
        held, self.held = list(self.held), {}
        self._closed = self._lets_finish = False
        return held

    def holds_back(self, message: AddRequest) -> bool:
        """Whether this request, which comes now, has to wait for the end of the pause."""
        return self._lets_finish and not message.continues

    def hold(self, lead: Sequence) -> None:
        self.held[lead] = None

    def forget(self, sequence: Sequence) -> bool:
        """Whether it was held back."""
        return sequence in self.held and self.held.pop(sequence) is None

    def stops(self, open_requests: int) -> bool:
        """Whether nothing may be scheduled, with so many requests that have not ended."""
        return self._closed and not (self._lets_finish and open_requests > len(self.held))

    def check_integrity(self) -> None:
        assert self._closed or not self.held
        requests = [s.request.request_id for s in self.held]
        assert len(requests) == len(set(requests)), "a request is held back twice"
        for sequence in self.held:
            assert (sequence.state, sequence.row) == (SequenceState.WAITING, NO_ROW)
