"""First come, first served."""

from foreword.scheduler.request import Request


def fcfs(request: Request) -> tuple[int, ...]:
    """By arrival. A preempted request arrived before all waiting ones, so it is first again."""
    return (request.arrival,)
