"""Order of admission and preemption. A policy is one function of a request, in its own file.

The waiting request with the smallest key is admitted first, and the running one with the largest is preempted first,
so a request is never preempted for one that comes after it. Keys end in the arrival number: the order is total.
"""

from foreword.scheduler.policies.fcfs import fcfs
from foreword.scheduler.policies.policy import Policy
from foreword.scheduler.policies.priority import priority
from foreword.scheduler.policies.shortest_first import shortest_first

POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest-first": shortest_first}

__all__ = ["POLICIES", "Policy", "fcfs", "priority", "shortest_first"]
