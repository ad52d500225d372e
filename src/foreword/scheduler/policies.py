"""The order of admission and preemption. A policy is one function of a request, for requests of equal priority.

A request is never preempted for a request that comes later in this order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from foreword.errors import RequestError, shown
from foreword.plugins import load_plugin
from foreword.scheduler.request import Request

Key = Callable[[Request], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of requests: the waiting one with the smallest key is admitted first, the running one with the largest
    is preempted first. A key ends in ``request.arrival``, so that the order is total. Under every policy, the priority
    is compared before the key.

    is_fair: the key is made by the scheduler's `Shares`, in place of ``key``.
    """

    name: str
    key: Key
    is_fair: bool = False

    def key_of(self, request: Request, name: str | None = None) -> tuple[int, ...]:
        """Return the key of a request. It is computed once, so that a policy cannot fail while requests run.

        Raise RequestError if the policy fails, or its key is not a tuple of integers. name: the caller's name of the
        request.
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
            request.key = (request.priority, *key)
        return request.key


def fcfs(request: Request) -> tuple[int, ...]:
    """Order by arrival. A preempted request arrived before all waiting requests, so it is first again."""
    return (request.arrival,)


def shortest_first(request: Request) -> tuple[int, ...]:
    """Order by prompt length, shortest first: this minimises the mean time to the first token. Under overload, long
    prompts may starve.
    """
    return (len(request.prompt), request.arrival)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", fcfs),
        Policy("priority", fcfs),  # as every policy honours priorities
        Policy("shortest-first", shortest_first),
        Policy("fair", fcfs, is_fair=True),
    )
}


def policy_of(given: object) -> Policy:
    """Return the policy for a value: a name in `POLICIES`, a `Policy`, a function from a request to its key, or a name
    that `load_plugin` reads. Raise ValueError for other values.
    """
    if isinstance(given, str):
        if given in POLICIES:
            return POLICIES[given]
        try:
            given = load_plugin("policies", given)
        except ValueError as error:
            raise ValueError(f"must be one of {', '.join(map(repr, POLICIES))}, or a plug-in: {error}") from None
    if isinstance(given, Policy):
        return given
    if not callable(given):
        raise ValueError(f"must be one of {', '.join(map(repr, POLICIES))}, or a function of a request")
    return Policy(getattr(given, "__name__", repr(given)), cast(Key, given))
