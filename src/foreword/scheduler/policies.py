"""The order of admission and preemption. A policy is one function of a request, for requests of equal priority.

A request is never preempted for one that comes after it.
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
    is preempted first. A key ends in ``request.arrival``, so that the order is total. The priority comes before the
    key, under every policy.

    is_fair: the key is made by the scheduler's `Shares`, in place of ``key``.
    """

    name: str
    key: Key
    is_fair: bool = False

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
            request.key = (request.priority, *key)
        return request.key


def fcfs(request: Request) -> tuple[int, ...]:
    """By arrival. A preempted request arrived before all waiting ones, so it is first again."""
    return (request.arrival,)


def shortest_first(request: Request) -> tuple[int, ...]:
    """By prompt tokens, fewer first: the least mean time to a first token. Under overload long prompts may starve."""
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
    """Return the policy that is given: one of `POLICIES` by name, a `Policy`, a function from a request to its key, or
    the name of one as `load_plugin` reads it. ValueError for others.
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
