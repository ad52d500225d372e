"""The type of a policy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foreword.errors import RequestError, shown
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

    def key_of(self, request: Request, name: str | None = None) -> tuple[int, ...]:
        """Return the key of a request. It is made once, so that a policy cannot fail while requests run.

        RequestError if it cannot be made, or is not a tuple of integers. name: of the request as its caller knows it.
        """
        if request.key is None:
            try:
                key = self.key(request)
                reason = f"gives the key {shown(key)}"
            except MemoryError:
                raise
            except Exception as error:
                key, reason = (), f"raises {type(error).__name__}: {error}"
            if not isinstance(key, tuple) or not key or not all(isinstance(one, int | np.integer) for one in key):
                fix = "Let it return a tuple of integers that ends in request.arrival."
                raise RequestError(name or request.request_id, "policy", self.name, reason, fix)
            request.key = key
        return request.key
