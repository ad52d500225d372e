"""Numbers of a long run in constant memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LOW, BINS_PER_DECADE, DECADES = 1e-5, 200, 10


class LatencyHistogram:
    """Durations in seconds from 10 µs to 10⁵ s, each kept to 1.2 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS_PER_DECADE * DECADES, np.int64)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        place = (np.log10(np.maximum(seconds, LOW) / LOW) * BINS_PER_DECADE).astype(np.int64)
        np.add.at(self._counts, np.minimum(place, len(self._counts) - 1), 1)

    def add_many(self, seconds: float, count: int) -> None:
        """``count`` durations of ``seconds`` each."""
        place = int(np.log10(max(seconds, LOW) / LOW) * BINS_PER_DECADE)
        self._counts[min(place, len(self._counts) - 1)] += count

    def percentile(self, p: float) -> float:
        """The duration that p percent do not exceed; NaN without any."""
        if not self.count:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(self._counts), p / 100 * self.count))
        return float(LOW * 10 ** ((place + 0.5) / BINS_PER_DECADE))


class Series:
    """A quantity over time in at most 2 · ``size`` points: when full, every second one is dropped."""

    def __init__(self, size: int = 500) -> None:
        self._size, self._stride, self._skip = size, 1, 0
        self.points: list[tuple[float, float]] = []

    def add(self, time: float, value: float) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._skip = self._stride - 1
        self.points.append((time, value))
        if len(self.points) >= 2 * self._size:
            self.points = self.points[::2]
            self._stride *= 2

    def plot(self, width: int = 60) -> str:
        """One line of block characters for values from 0 to 1."""
        if not self.points:
            return ""
        values = np.array([v for _, v in self.points])
        parts = np.array_split(values, min(width, len(values)))
        return "".join(" ▁▂▃▄▅▆▇█"[round(8 * min(max(float(part.mean()), 0.0), 1.0))] for part in parts)
