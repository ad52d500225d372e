"""The order of admission and preemption. A policy is one function of a request, in its own file.

A request is never preempted for one that comes after it.
"""

from __future__ import annotations

from typing import cast

from foreword.plugins import load_plugin
from foreword.scheduler.policies.fcfs import fcfs
from foreword.scheduler.policies.policy import Key, Policy
from foreword.scheduler.policies.priority import priority
from foreword.scheduler.policies.shortest_first import shortest_first

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", fcfs),
        Policy("priority", priority, reads_priority=True),
        Policy("shortest-first", shortest_first),
    )
}


def policy_of(given: object) -> Policy:
    """Return the policy that is given: one of `POLICIES` by name, a `Policy`, a function from a request to its key, or
    the name of one as `load_plugin` reads it. A function counts as one that reads priorities. ValueError for others.
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
    return Policy(getattr(given, "__name__", repr(given)), cast(Key, given), reads_priority=True)


__all__ = ["POLICIES", "Key", "Policy", "fcfs", "policy_of", "priority", "shortest_first"]
