"""Measure the difference of answers to equal prompts on a server without a fault: rounding that depends on shapes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from foreword.blackbox.replay import Answer, Ask, Conversation, Outcome, ServerError, alone, difference, hold
from foreword.blackbox.server import Server

FLOOR = 1e-3  # nats
LARGEST = 0.1  # nats that a crowd or a cache hit may add by rounding
FACTOR = 3.0
UNDECIDABLE = 0.5
WORDS = (5, 17, 40, 100)


@dataclass(frozen=True, slots=True)
class Noise:
    """Largest distances, in nats, of greedy answers to the prompt alone: again alone, with a cache hit, in a crowd.

    Without log-probabilities a distance is 0 or infinite.
    """

    alone: float
    hit: float
    crowd: float

    @property
    def tolerance(self) -> float:
        """A crowd and a hit change shapes, and so roundings, but also show faults: beyond LARGEST they do not count."""
        return max(FLOOR, FACTOR * max(self.alone, min(self.hit, LARGEST), min(self.crowd, LARGEST)))

    @property
    def texts_are_unstable(self) -> bool:
        """Return whether some texts differ where only texts can be compared."""
        return math.inf in (self.alone, self.hit, self.crowd)

    def __str__(self) -> str:
        if self.texts_are_unstable:
            return "answers to equal prompts differ now and then"
        return f"alone {self.alone:.2g}, with a hit {self.hit:.2g}, in a crowd {self.crowd:.2g} nats"


def measure(server: Server, rng: random.Random, concurrency: int) -> Noise:
    """Measure the noise. ServerError if equal requests, alone, are too far apart for anything to be decided."""
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
    # Without a way to leave out the cache, only the first time is cold.
    repeated = far(cold, again) if target.cold_is_certain else far(*hits)
    if math.inf > repeated > UNDECIDABLE:
        raise ServerError(
            "answers of equal requests differ",
            f"greedy answers to one prompt, sent alone, are up to {repeated:.3g} nats apart, so a fault of the cache "
            "cannot be told from noise; does the server follow temperature 0?",
        )
    return Noise(repeated, far(cold, hits[1]), far(fresh, crowded))


def _answers(outcome: Outcome) -> list[Answer]:
    """Return the answers in order. Raise the first failure, since the noise of a server that fails is not known."""
    for failure in outcome.failures.values():
        raise failure
    return [outcome.answers[i] for i in sorted(outcome.answers)]
