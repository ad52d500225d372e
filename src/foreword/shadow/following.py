"""The parts that the followers of several engines share: a scheduled request in the form of its engine, and steps in
flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from foreword.arrays import AnyArray
from foreword.shadow.outlets import Outlets
from foreword.shadow.shadow import Scheduled, Shadow


def on_cpu(values: Any) -> AnyArray:
    """Return a copy in host memory of an array, a list, or a PyTorch tensor on any device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values).copy()


class Step(NamedTuple):
    """A step as its engine prepared it. gone: requests that left before it. preempted: those of them that will be
    admitted again.
    """

    requests: Sequence[Scheduled]
    tensors: Mapping[str, Any]
    gone: Collection[str]
    preempted: Collection[str]


class Following:
    """The steps of an engine that may prepare a step before the samples of the step before are known.

    A step is followed when the samples of the step before are known. Until then its values, which are copies, are kept.
    """

    def __init__(self, shadow: Shadow, outlets: Outlets | None = None) -> None:
        self.shadow, self._outlets = shadow, outlets
        self._steps: deque[Step] = deque()  # the first step is followed, and its samples are not known yet

    @property
    def awaited(self) -> list[str]:
        """Return the requests of the step whose samples come next."""
        return [request.req_id for request in self._steps[0].requests] if self._steps else []

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps whose samples are not known."""
        return len(self._steps)

    def prepared(
        self,
        requests: Sequence[Scheduled],
        tensors: Mapping[str, Any],
        gone: Collection[str] = (),
        preempted: Collection[str] = (),
    ) -> None:
        """Follow a step: its requests in batch order, and the tensors that the runner made. See `Step`."""
        self._steps.append(Step(requests, tensors, gone, preempted))
        if len(self._steps) == 1:
            self._begin()

    def sampled(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Follow the samples of the oldest step without samples, and then the step after it."""
        self._steps.popleft()
        if self._outlets is None:
            self.shadow.commit(tokens)
        else:
            self._outlets.commit(tokens)
        if self._steps:
            self._begin()

    def _begin(self) -> None:
        step = self._steps[0]
        self.shadow.follow(step.requests, step.gone)
        found = self.shadow.step(self.awaited, step.tensors)
        if self._outlets is not None:
            self._outlets.step(step.tensors, found, step.preempted)
