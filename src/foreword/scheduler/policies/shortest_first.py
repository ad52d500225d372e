"""Shortest prompt first: the lowest mean time to the first token, at the price of the longest prompts."""

from foreword.scheduler.request import Request


def shortest_first(request: Request) -> tuple[int, ...]:
    """By prompt tokens, fewer first. Under lasting overload a long prompt may wait forever."""
    return (len(request.prompt), request.arrival)
