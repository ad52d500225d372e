"""The type of a policy."""

from collections.abc import Callable
from dataclasses import dataclass

from foreword.scheduler.request import Request

Key = Callable[[Request], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of requests: the waiting one with the smallest key is admitted first, the running one with the largest
    is preempted first. A key ends in ``request.arrival``, so that the order is total.

    reads_priority: the key depends on ``request.priority``; under another policy a request with a priority is refused.
    """

    name: str
    key: Key
    reads_priority: bool = False
