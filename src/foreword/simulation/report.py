"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.simulation.rows import SimulatedRequest
from foreword.simulation.statistics import Durations, LatencyHistogram, TimeSeries


@dataclass(slots=True, kw_only=True)
class SimulationReport:
    """Counts over all replicas. Times are simulated seconds.

    time_to_first_token, time_per_output_token, end_to_end: one value per request. The time per output token is the mean
    over the tokens of a request after the first one, for requests with at least two tokens. time_between_tokens: one
    value per pair of successive tokens. seconds: from the beginning of the trace to the end of the last request. busy:
    seconds in steps, for each replica that had a request. memory_use: the share of blocks in use, of a single replica.
    num_leaked_blocks: the number of blocks in use at the end.
    """

    num_replicas: int = 1
    num_steps: int = 0
    seconds: float = 0.0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_leaked_blocks: int = 0
    peak_memory_use: float = 0.0
    busy: list[float] = field(default_factory=list)
    time_to_first_token: Durations = field(default_factory=Durations)
    time_per_output_token: Durations = field(default_factory=Durations)
    end_to_end: Durations = field(default_factory=Durations)
    time_between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)
    memory_use: TimeSeries = field(default_factory=TimeSeries)

    @property
    def num_requests(self) -> int:
        return self.end_to_end.count

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were in the cache."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def busy_share(self) -> float:
        """The share of the replicas' time in steps."""
        return sum(self.busy) / (self.num_replicas * self.seconds) if self.seconds else 0.0

    @property
    def imbalance(self) -> float:
        """The time in steps of the busiest replica, divided by the mean of all replicas."""
        return max(self.busy, default=0.0) * self.num_replicas / total if (total := sum(self.busy)) else 1.0

    @property
    def busy_hours_per_million(self) -> float:
        """The hours in steps, summed over the replicas, per million output tokens."""
        return sum(self.busy) / 3600 / max(self.num_output_tokens, 1) * 1e6

    def add_times(self, request: SimulatedRequest, now: float) -> None:
        """Add the times of a request that has ended with all of its tokens."""
        self.time_to_first_token.add(request.first_token - request.arrived)
        self.end_to_end.add(now - request.arrived)
        rest = request.max_len - len(request.prompt) - 1
        if rest:
            self.time_per_output_token.add((now - request.first_token) / rest)

    def add(self, other: SimulationReport) -> None:
        """Add the report of other replicas of the same run."""
        for name in ("num_steps", "num_output_tokens", "num_preemptions", "num_prompt_tokens", "num_cached_tokens",
                     "num_leaked_blocks"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds = max(self.seconds, other.seconds)
        self.peak_memory_use = max(self.peak_memory_use, other.peak_memory_use)
        self.busy += other.busy
        for name in ("time_to_first_token", "time_per_output_token", "end_to_end", "time_between_tokens"):
            getattr(self, name).extend(getattr(other, name))
