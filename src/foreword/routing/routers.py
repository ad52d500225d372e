"""Routers: each chooses a replica for a request. A router knows only which requests it sent and which have ended.

    choose ──▶ Placement (replica, work) ──▶ … ──▶ ended(placement)

Work is counted in tokens that a replica has to compute: the prompt tokens that are probably not in its cache, and
`REQUEST_TOKENS` for the answer. A choice costs at most O(replicas), in a few array operations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from foreword.errors import CapacityError, ConfigError
from foreword.routing.prefixes import PrefixIndex

REQUEST_TOKENS = 512
"""Tokens of a prompt that are as much work as one answer, whose length is not known."""


NEW_TOKEN_WEIGHT = 4
"""Work that may wait elsewhere instead of a token being computed again, which would take time from all requests."""


@dataclass(slots=True)
class Placement:
    """A request on its replica, and the work that it adds there until it ends. It must not be changed."""

    replica: int
    work: int


class Router:
    """The base class: it stores the work of each replica, and which replicas accept requests.

    work: int64 [replicas], the work of the requests in progress. Every router is deterministic.
    """

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ConfigError(f"replicas={num_replicas}: must be at least 1")
        self.work = np.zeros(num_replicas, np.int64)
        self._is_closed = np.zeros(num_replicas, np.bool_)
        self._any_closed = False

    def choose(
        self, num_tokens: int, pieces: Sequence[int] = (), piece_size: int = 512, avoid: Collection[int] = ()
    ) -> Placement:
        """Choose the replica of a request with this many prompt tokens. Raise CapacityError if no replica accepts it.

        pieces: names of the prompt's pieces of ``piece_size`` tokens; see `PrefixIndex`. avoid: replicas that must not
        be chosen.
        """
        before = self._is_closed, self._any_closed
        if avoid:
            self._is_closed, self._any_closed = self._is_closed.copy(), True
            self._is_closed[list(avoid)] = True
        try:
            if self._any_closed and self._is_closed.all():
                raise CapacityError("no replica takes requests")
            placement = self._choose(num_tokens, pieces, piece_size)
        finally:
            self._is_closed, self._any_closed = before
        self.work[placement.replica] += placement.work
        return placement

    def ended(self, placement: Placement) -> None:
        """Record that the request of a placement has ended, for any reason."""
        self.work[placement.replica] -= placement.work

    def close(self, replica: int) -> None:
        """Stop sending requests to the replica."""
        self._is_closed[replica] = self._any_closed = True

    def open(self, replica: int, *, is_empty: bool = True) -> None:
        """Send requests to the replica again. is_empty: its cache was lost."""
        self._is_closed[replica] = False
        self._any_closed = bool(self._is_closed.any())

    def is_open(self, replica: int) -> bool:
        return not self._is_closed[replica]

    def _choose(self, num_tokens: int, pieces: Sequence[int], piece_size: int) -> Placement:
        raise NotImplementedError

    def _least(self) -> int:
        """Return the first open replica with the least work."""
        work = np.where(self._is_closed, np.iinfo(np.int64).max, self.work) if self._any_closed else self.work
        return int(work.argmin())


class RoundRobin(Router):
    """Choose one replica after the other."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._next = 0

    def _choose(self, num_tokens: int, pieces: Sequence[int], piece_size: int) -> Placement:
        while self._is_closed[self._next]:
            self._next = (self._next + 1) % len(self.work)
        chosen, self._next = self._next, (self._next + 1) % len(self.work)
        return Placement(chosen, num_tokens + REQUEST_TOKENS)


class TwoChoices(Router):
    """Choose, of two replicas drawn at random, the one with less work."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._random = Random(0)

    def _choose(self, num_tokens: int, pieces: Sequence[int], piece_size: int) -> Placement:
        first, second = self._draw(), self._draw()
        return Placement(first if self.work[first] <= self.work[second] else second, num_tokens + REQUEST_TOKENS)

    def _draw(self) -> int:
        while True:
            found = self._random.randrange(len(self.work))
            if not self._is_closed[found]:
                return found


class LeastLoaded(Router):
    """Choose the replica with the least work."""

    def _choose(self, num_tokens: int, pieces: Sequence[int], piece_size: int) -> Placement:
        return Placement(self._least(), num_tokens + REQUEST_TOKENS)


PIECES_PER_REPLICA = 8192
"""Pieces that a router remembers per replica: of 512 tokens, as many as a pool of 4 million tokens holds."""

MAX_PIECES = 2**21
"""The most that it remembers, in some 200 MB."""


class Sticky(Router):
    """Choose the replica that had the longest prefix of the prompt, regardless of its work; if none had any, the one
    with the least work.
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._index = PrefixIndex(min(PIECES_PER_REPLICA * num_replicas, MAX_PIECES))

    def open(self, replica: int, *, is_empty: bool = True) -> None:
        super().open(replica)
        if is_empty:
            self._index.forget(replica)

    def _choose(self, num_tokens: int, pieces: Sequence[int], piece_size: int) -> Placement:
        least = self._least()
        found = self._index.matches(pieces)
        best = least
        if found:
            best = min(
                (r for r in (least, *found) if not self._is_closed[r]),
                key=lambda r: self._cost(r, max(num_tokens - found.get(r, 0) * piece_size, 0)),
            )
        self._index.add(pieces, best)
        return Placement(best, max(num_tokens - found.get(best, 0) * piece_size, 0) + REQUEST_TOKENS)

    def _cost(self, replica: int, num_new: int) -> tuple[int, int]:
        """Return the cost to minimise. num_new: the prompt tokens that each replica has to compute."""
        return num_new, int(self.work[replica])


class Prefix(Sticky):
    """Minimise the sum of the replica's work and the weighted number of prompt tokens that it does not have."""

    def _cost(self, replica: int, num_new: int) -> tuple[int, int]:
        return int(self.work[replica]) + NEW_TOKEN_WEIGHT * num_new, 0


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "two-choices": TwoChoices,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
    "prefix": Prefix,
}


def make_router(name: str, num_replicas: int) -> Router:
    """Return a router by its name. Raise ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"router={name!r:.80}: must be one of {', '.join(map(repr, ROUTERS))}")
    return ROUTERS[name](num_replicas)
