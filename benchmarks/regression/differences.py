"""Which figures of two commits differ by more than noise: paired ratios, their intervals, and the same commit twice.

In each turn the base is measured twice and the change once, right after each other, so that whatever the machine does
for longer than a turn is in all three. In turn t, with the samples first[t] and second[t] of the base and changed[t]:

    ratio[t] = changed[t] / sqrt(first[t] · second[t])        same[t] = second[t] / first[t]

The interval of a median is that of two order statistics, which holds for any distribution: of n ratios in order, the
median of the distribution is below the k-th with the probability P(X < k), X the heads of n coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import median

CONFIDENCE = 0.99
"""Of each interval: some of twenty figures would leave one of 0.95 in every other run."""
FEWEST = 8
"""Turns without which no interval has the confidence."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds of its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the narrowest interval of two order statistics with the confidence.

        Raise ValueError for too few values.
        """
        n, tail, k = len(values), 0.0, 0
        while 2 * (tail := tail + comb(n, k) / 2**n) <= 1 - CONFIDENCE:
            k += 1
        if not k:
            raise ValueError(f"{n} turns: an interval needs at least {FEWEST}")
        ordered = sorted(values)
        return cls(median(ordered), ordered[k - 1], ordered[n - k])

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both commits. base: its median. ratio: the change over the base; same: the base over itself."""

    name: str
    unit: str
    base: float
    ratio: Interval
    same: Interval

    @classmethod
    def of(
        cls, name: str, unit: str, first: Sequence[float], second: Sequence[float], changed: Sequence[float]
    ) -> Difference:
        ratios = [c / sqrt(a * b) for a, b, c in zip(first, second, changed, strict=True)]
        same = [b / a for a, b in zip(first, second, strict=True)]
        return cls(name, unit, median([*first, *second]), Interval.of(ratios), Interval.of(same))

    @property
    def verdict(self) -> str:
        """Return "slower", "faster", "" if the change is within the noise, or "unsteady" if the base differs from
        itself.
        """
        if not self.same.low <= 1 <= self.same.high:
            return "unsteady"
        if self.ratio.low <= 1 <= self.ratio.high or self.ratio.overlaps(self.same):
            return ""
        return "slower" if self.ratio.median > 1 else "faster"


def table(differences: Sequence[Difference]) -> list[str]:
    """Return the lines of a table of all figures, and what changed."""
    lines = [f"{'':<20}{'base':>12}{'change / base':>16}{'interval':>18}{'base / base':>18}"]
    for one in differences:
        lines.append(
            f"{one.name:<20}{f'{one.base:.4g} {one.unit}':>12}{one.ratio.median:>16.3f}{_bounds(one.ratio):>18}"
            f"{_bounds(one.same):>18}  {one.verdict}".rstrip()
        )
    for verdict in ("slower", "faster", "unsteady"):
        names = [one.name for one in differences if one.verdict == verdict]
        lines.append(f"{verdict}: {', '.join(names) or 'nothing'}")
    return lines


def _bounds(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"
