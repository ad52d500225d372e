"""Measure the difference of answers to equal prompts on a server without a fault: rounding that depends on shapes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from foreword.blackbox.replay import Answer, Ask, Conversation, Outcome, ServerError, alone, difference, hold
from foreword.blackbox.server import Server

FLOOR = 1e-3  # nats
LARGEST = 0.1  # largest difference in nats that concurrent requests or a cache hit may cause by rounding
FACTOR = 3.0
UNDECIDABLE = 0.5
WORDS = (5, 17, 40, 100)


@dataclass(frozen=True, slots=True)
class Noise:
    """Largest distances, in nats, from the greedy answer to a prompt alone: alone again, with a cache hit, and with
    concurrent requests.

    Without log-probabilities a distance is 0 or infinite.
    """

    alone: float
    hit: float
    crowd: float

    @property
    def tolerance(self) -> float:
        """The distance that counts as equal. Concurrent requests and cache hits change shapes, and so the rounding, but
        may also show faults; distances above LARGEST therefore do not count.
        """
        return max(FLOOR, FACTOR * max(self.alone, min(self.hit, LARGEST), min(self.crowd, LARGEST)))

    @property
    def texts_are_unstable(self) -> bool:
        """Return whether only texts can be compared, and some of them differ."""
        return math.inf in (self.alone, self.hit, self.crowd)

    def __str__(self) -> str:
        if self.texts_are_unstable:
            return "answers to equal prompts differ now and then"
        return f"alone {self.alone:.2g}, with a hit {self.hit:.2g}, in a crowd {self.crowd:.2g} nats"


def measure(server: Server, rng: random.Random, concurrency: int) -> Noise:
    """Measure the noise. Raise ServerError if the answers to equal requests, sent alone, differ too much to find
    faults.
    """
    target, model = server.target, server.models[0]
    lengths = [count for count in WORDS if count <= server.max_words]
    asks = tuple(Ask(((i, lengths[i % len(lengths)]),), 8, model=model) for i in range(max(concurrency, len(lengths))))
    crowd, measured = Conversation((asks,)), range(len(lengths))
    copy = f"noise {rng.random()}"

    def far(first: list[Answer], second: list[Answer]) -> float:
        both = zip(first, second, strict=True)
        return max(difference(a.choices[0], b.choices[0]).distance for a, b in both)

    cold = [alone(target, copy, crowd, i, {}) for i in measured]
    again = [alone(target, copy, crowd, i, {}) for i in measured]
    singles = Conversation(tuple((ask,) for ask in asks[: len(lengths)]))
    hits = [_answers(hold(target, copy, singles)) for _ in range(2)]
    crowded = _answers(hold(target, f"{copy} crowd", crowd))[: len(lengths)]
    fresh = [alone(target, f"{copy} crowd", crowd, i, {}) for i in measured]
    # Without a way to bypass the cache, only the first request is computed without it.
    repeated = far(cold, again) if target.cold_is_certain else far(*hits)
    if math.inf > repeated > UNDECIDABLE:
        raise ServerError(
            "answers of equal requests differ",
            f"greedy answers to one prompt, sent alone, are up to {repeated:.3g} nats apart, so a fault of the cache "
            "cannot be told from noise; does the server follow temperature 0?",
        )
    return Noise(repeated, far(cold, hits[1]), far(fresh, crowded))


def _answers(outcome: Outcome) -> list[Answer]:
    """Return the answers in order. Raise the first failure, because a failing server's noise cannot be measured."""
    for failure in outcome.failures.values():
        raise failure
    return [outcome.answers[i] for i in sorted(outcome.answers)]
