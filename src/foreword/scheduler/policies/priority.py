"""Priority classes."""

from foreword.scheduler.request import Request


def priority(request: Request) -> tuple[int, ...]:
    """By priority, smaller first; first come, first served inside a class."""
    return (request.priority, request.arrival)
