"""Who goes first. A policy is one function of a request; each stands in its own file.

The waiting request with the smallest key is admitted first, and the running one with the largest is preempted first,
so nobody is preempted for somebody it would have gone before. Keys end in the arrival number: the order is total.
"""

from foreword.scheduler.policies.fcfs import fcfs
from foreword.scheduler.policies.policy import Policy
from foreword.scheduler.policies.priority import priority
from foreword.scheduler.policies.shortest_first import shortest_first

POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest-first": shortest_first}

__all__ = ["POLICIES", "Policy", "fcfs", "priority", "shortest_first"]
