"""Statistics of a long run in constant memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from math import ceil

import numpy as np

from foreword.arrays import F32, F64

LOW, BINS_PER_DECADE, DECADES = 1e-5, 200, 10
# Bin i holds durations in (EDGES[i − 1], EDGES[i]]; the first and the last one are open.
EDGES = LOW * 10 ** (np.arange(1, BINS_PER_DECADE * DECADES) / BINS_PER_DECADE)
_EDGES = EDGES.tolist()  # for the lookup of single durations


class Durations:
    """Durations in seconds, with four bytes each. Percentiles are exact for the values rounded to 24 bits."""

    def __init__(self) -> None:
        self._values = array("f")

    @property
    def count(self) -> int:
        return len(self._values)

    def add(self, seconds: float) -> None:
        self._values.append(seconds)

    def extend(self, other: Durations) -> None:
        """Add all durations of another collection."""
        self._values.extend(other._values)

    @property
    def values(self) -> F32:
        """Return the durations, float32 [count], in the order in which they were added."""
        return np.array(self._values, np.float32)

    def percentiles(self, *levels: float) -> list[float]:
        """Return for each level p the smallest duration that at least p percent of all durations do not exceed; NaN if
        there are none.
        """
        if not self._values:
            return [float("nan")] * len(levels)
        places = [max(ceil(p / 100 * self.count) - 1, 0) for p in levels]
        ordered = np.partition(self.values, places)
        return [float(ordered[place]) for place in places]

    def percentile(self, p: float) -> float:
        return self.percentiles(p)[0]


class LatencyHistogram:
    """Durations in seconds from 10 µs to 10⁵ s, each with an error of at most 1.2 %. counts: int64, one entry per
    bin.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(len(EDGES) + 1, np.int64)

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def add(self, seconds: Sequence[float] | F64, times: int = 1) -> None:
        """Add each of these durations ``times`` times."""
        if not len(seconds):
            return
        low, high = bisect_left(_EDGES, min(seconds)), bisect_left(_EDGES, max(seconds))
        if low == high:  # the usual case: all requests of a step wait for the same time
            self.counts[low] += times * len(seconds)
        else:
            found = np.bincount(EDGES.searchsorted(seconds) - low)
            self.counts[low : low + len(found)] += times * found

    def extend(self, other: LatencyHistogram) -> None:
        """Add all durations of another collection."""
        self.counts += other.counts

    def percentile(self, p: float) -> float:
        """Return the duration that p percent of all durations do not exceed; NaN if there are none."""
        if not self.count:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(self.counts), p / 100 * self.count))
        return float(LOW * 10 ** ((place + 0.5) / BINS_PER_DECADE))


class TimeSeries:
    """A quantity over time, as the means of at most ``size`` spans of equal length. The length doubles when the spans
    are full.
    """

    def __init__(self, size: int = 512) -> None:
        self._sums = np.zeros(size)  # value · seconds, by span
        self._span = 1e-3
        self._now, self._value = 0.0, 0.0
        self.peak = 0.0

    def add(self, time: float, value: float) -> None:
        """Set the quantity to ``value`` from ``time`` on. Times must not decrease."""
        self._fill(time)
        self._value = value
        self.peak = max(self.peak, value)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return (end of the span, mean) for each span; the last span ends at the last ``add``."""
        full = int(self._now / self._span)
        ends = [(i + 1) * self._span for i in range(full)]
        means = (self._sums[:full] / self._span).tolist()
        rest = self._now - full * self._span
        if rest > 1e-9 * self._now and full < len(self._sums):
            ends.append(self._now)
            means.append(float(self._sums[full]) / rest)
        return list(zip(ends, means, strict=True))

    def plot(self, width: int = 60, *, top: float = 1.0) -> str:
        """Return one line of block characters for values from 0 to ``top``."""
        values = np.array([v for _, v in self.points])
        if not len(values):
            return ""
        parts = np.array_split(values, min(width, len(values)))
        return "".join(" ▁▂▃▄▅▆▇█"[round(8 * min(max(float(part.mean()) / top, 0.0), 1.0))] for part in parts)

    def _fill(self, time: float) -> None:
        """Add the value to the spans up to ``time``."""
        while time >= self._span * len(self._sums):
            half = len(self._sums) // 2
            self._sums[:half] = self._sums.reshape(half, 2).sum(1)
            self._sums[half:] = 0.0
            self._span *= 2
        first, last = int(self._now / self._span), int(time / self._span)
        if first == last:
            self._sums[first] += self._value * (time - self._now)
        else:
            self._sums[first] += self._value * ((first + 1) * self._span - self._now)
            self._sums[first + 1 : last] += self._value * self._span
            self._sums[last] += self._value * (time - last * self._span)
        self._now = time
