"""Divide the computed tokens among owners, such as API keys: each request gets its place in a virtual time.

    start  = max(now, end of its owner's latest request)        now: the latest start of an admitted request
    end    = start + tokens / share

Requests in the order of their starts serve owners that always have some in the proportion of their shares, and an owner
that was idle gains nothing by it (start-time fair queueing). A place is determined once, when a request arrives.
"""

from __future__ import annotations

from foreword.scheduler.request import Request

EXPECTED = 256
"""Output tokens that a request is expected to have at most, until it ends."""
UNITS = 1 << 10
"""The units of virtual time per token of a share of 1: keys of policies are integers."""
MOST_IDLE = 1 << 12
"""The number of owners from which on those without requests are forgotten."""


class Shares:
    """The account of each owner. The cost of a request is O(1)."""

    __slots__ = ("_ends", "_most", "_now", "_starts")

    def __init__(self) -> None:
        self._now, self._most = 0, MOST_IDLE
        self._ends: dict[str, int] = {}
        self._starts: dict[str, int] = {}  # only of requests that have not ended

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the place of a request that arrives now."""
        return max(self._now, self._ends.get(request.owner, 0)), request.arrival

    def added(self, request: Request, start: int) -> None:
        """Charge the owner of a request that waits now for the expected tokens. Call it once per request."""
        if request.request_id not in self._starts:
            self._starts[request.request_id] = start
            end = max(start, self._ends.get(request.owner, 0))
            self._ends[request.owner] = end + _units(request, _expected(request))

    def admitted(self, request: Request) -> None:
        """Record that the request has got a row."""
        self._now = max(self._now, self._starts.get(request.request_id, 0))

    def ended(self, request: Request) -> None:
        """Charge the owner of a request that has left for its actual tokens, in place of the expected ones."""
        if self._starts.pop(request.request_id, None) is None:
            return
        has_run = request.has_run or len(request.output) > 0
        num_tokens = len(request) - request.num_cached if has_run else 0
        end = self._ends.get(request.owner, self._now)
        self._ends[request.owner] = end + _units(request, num_tokens - _expected(request))
        if len(self._ends) > self._most:  # after as many changes as there are owners, so that each costs O(1)
            self._ends = {owner: end for owner, end in self._ends.items() if end > self._now}
            self._most = max(MOST_IDLE, 2 * len(self._ends))

    def ahead(self, request: Request) -> int:
        """Return about how many tokens of each other owner with a share of 1 come before a waiting request because its
        owner had its share; 0 if it does not wait for that.
        """
        return max(self._starts.get(request.request_id, 0) - self._now, 0) // UNITS


def _expected(request: Request) -> int:
    prompt = len(request.prompt)
    return prompt + min(request.max_len - prompt, EXPECTED)


def _units(request: Request, num_tokens: int) -> int:
    return int(num_tokens * UNITS / request.share)
