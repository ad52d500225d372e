"""Buffers that two or more steps in flight use in turn."""

from __future__ import annotations

from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.arena import Allocator
from foreword.batch.step.buffers import InputBuffers
from foreword.errors import ConfigError, PlanError


class StagingRing:
    """``depth`` `InputBuffers` used in turn. A slot is reused after its step was released: no step in flight reads it.

    buffers = ring.acquire()                       # refuses while the step that used the slot is in flight
    batch = prepare_inputs(states, plan, buffers)
    …                                              # the step runs and reads the buffers
    ring.release(buffers)                          # the step no longer reads them
    """

    def __init__(
        self, states: RequestStates, *, max_num_batched_tokens: int, depth: int = 2, allocator: Allocator | None = None
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth}: a ring has at least one slot")
        self._slots = [
            InputBuffers.for_states(states, max_num_batched_tokens, allocator=allocator) for _ in range(depth)
        ]
        self._busy = [False] * depth
        self._next = 0

    @property
    def depth(self) -> int:
        return len(self._slots)

    def acquire(self) -> InputBuffers:
        """Return the next slot's buffers; PlanError while its last step is in flight."""
        slot = self._next
        if self._busy[slot]:
            raise PlanError(
                f"slot {slot} of {self.depth} is still read by the step prepared in it: release that step first, or "
                "build the ring deeper",
                tensor="StagingRing",
                index=slot,
            )
        self._busy[slot] = True
        self._next = (slot + 1) % len(self._slots)
        return self._slots[slot]

    def release_all(self) -> None:
        """Mark all buffers as free, because no step reads them any more."""
        self._busy[:] = [False] * self.depth

    def release(self, buffers: InputBuffers) -> None:
        """Mark the buffers of a step as free. Raise PlanError if they are not in use, or belong to another ring."""
        for slot, candidate in enumerate(self._slots):
            if candidate is buffers and self._busy[slot]:
                self._busy[slot] = False
                return
        raise PlanError("these buffers are not in use in this ring", tensor="StagingRing")
