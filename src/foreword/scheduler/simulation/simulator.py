"""The real scheduler and cache under a recorded load, with a clock instead of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from foreword.arrays import I32
from foreword.batch import KVGroup, RequestStates
from foreword.batch.values.sampling_params import SamplingParams
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.simulation.cost import CostModel
from foreword.scheduler.simulation.statistics import LatencyHistogram, TimeSeries
from foreword.scheduler.simulation.trace import Arrival

GREEDY = SamplingParams(temperature=0.0)
# Under lasting overload the rest of the queue stays in the trace, so that memory stays flat.
MAX_WAITING = 4096
# Limit of steps simulated at once, so that the list of their times stays small.
MAX_REPEAT = 1024


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The outcome of a run. Times are simulated seconds; memory_use is the share of blocks with an owner."""

    num_requests: int
    num_steps: int
    seconds: float
    num_output_tokens: int
    time_to_first_token: LatencyHistogram
    time_between_tokens: LatencyHistogram
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    memory_use: TimeSeries
    num_leaked_blocks: int

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that the cache had."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0


def simulate(
    arrivals: Iterable[Arrival],
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int = 64,
    config: SchedulerConfig | None = None,
    cost: CostModel | None = None,
    prefix_caching: bool = True,
) -> SimulationReport:
    """Serve the arrivals to the end. Memory does not grow with their number.

    A request longer than max_model_len is cut to it, prompt first. Priorities are those of arrival order alone.
    Steps that only repeat the one before are simulated together, with the outcome of single steps; only memory_use is
    sampled at their end alone.
    """
    config = config or SchedulerConfig()
    if max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len}: must hold a prompt token and an output token")
    if num_blocks > 1 and max_model_len > (num_blocks - 1) * block_size:  # before such an amount of memory is allocated
        raise ConfigError(
            f"max_model_len={max_model_len}: {num_blocks} blocks of {block_size} hold {(num_blocks - 1) * block_size} "
            "tokens, one block being the null block; use at most that, or raise num_blocks"
        )
    return _Simulation(
        RequestStates(
            max_num_reqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=2**31 - 1,
            kv_groups=[KVGroup(block_size)],
        ),
        num_blocks,
        config,
        cost or CostModel(),
        prefix_caching,
    ).run(arrivals)


class _Simulation:
    def __init__(
        self, states: RequestStates, num_blocks: int, config: SchedulerConfig, cost: CostModel, prefix_caching: bool
    ) -> None:
        self.states, self.cost = states, cost
        self.cache = KVCacheManager(states, num_blocks, prefix_caching=prefix_caching, partial_reuse=False)
        self.scheduler = Scheduler(states, self.cache, config)
        # Whether an arriving request may be admitted before the waiting ones.
        self.may_overtake = config.policy != "fcfs"
        self.now = 0.0
        self.num_steps = self.num_tokens = self.num_preemptions = self.num_prompt = self.num_cached = 0
        self.num_requests = 0
        self.first_token, self.between_tokens, self.memory = LatencyHistogram(), LatencyHistogram(), TimeSeries()
        self.last_time = np.zeros(states.max_num_reqs)  # by row: when its last token came, or the request itself
        self.has_token = np.zeros(states.max_num_reqs, np.bool_)
        self.waiting_since: dict[str, float] = {}  # waiting requests: their arrival, or their last token
        self.rows: dict[str, int] = {}  # running requests

    def run(self, arrivals: Iterable[Arrival]) -> SimulationReport:
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        pending = iter(arrivals)
        following = next(pending, None)
        while following is not None or scheduler.has_work:
            if following is not None:
                if not scheduler.has_work:
                    self.now = max(self.now, following.time)
                while following is not None and following.time <= self.now and len(waiting) < MAX_WAITING:
                    self._arrive(following)
                    following = next(pending, None)
            plan = scheduler.schedule()
            repeats = self._step(plan)
            while repeats:
                repeats = self._repeat(None if following is None else following.time)
        return SimulationReport(
            num_requests=self.num_requests,
            num_steps=self.num_steps,
            seconds=self.now,
            num_output_tokens=self.num_tokens,
            time_to_first_token=self.first_token,
            time_between_tokens=self.between_tokens,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            memory_use=self.memory,
            num_leaked_blocks=self.cache.pool.num_used,
        )

    def _arrive(self, arrival: Arrival) -> None:
        limit, index = self.states.max_model_len, self.num_requests
        prompt = arrival.prompt(index, limit - 1)
        request = Request(
            request_id=str(index),
            prompt=prompt,
            arrival=index,
            max_len=min(len(prompt) + arrival.output_length, limit),
            params=GREEDY,
        )
        self.num_requests += 1
        self.waiting_since[request.request_id] = arrival.time
        self.scheduler.add(request)

    def _step(self, plan: StepPlan) -> bool:
        """Take the step. Returns whether the next one repeats it: all requests decoded, and none can be admitted."""
        states, rows = self.states, plan.rows
        if plan.admitted or plan.preempted:
            self._note_moves(plan)
        computed = states.num_computed_tokens[rows] + plan.num_scheduled
        self.now += self.cost.seconds(plan.num_tokens, int(computed.sum()))
        states.num_computed_tokens[rows] = computed
        sampled = rows
        if len(plan.prefilling):
            sampled = rows[computed == states.num_tokens[rows]]
        known = states.num_tokens[sampled] + 1
        states.num_tokens[sampled] = known
        self.scheduler.commit(plan)

        waited = self.now - self.last_time[sampled]
        if plan.admitted or len(plan.prefilling):
            had_token = self.has_token[sampled]
            self.first_token.add(waited[~had_token])
            waited = waited[had_token]
            self.has_token[sampled] = True
        self.between_tokens.add(waited)
        self.last_time[sampled] = self.now
        self.num_steps += 1
        self.num_tokens += len(sampled)
        self.memory.add(self.now, self.cache.pool.num_used / (self.cache.pool.num_blocks - 1))
        all_decoded = len(sampled) == len(self.scheduler.running)
        ended = self._end(sampled, known)
        return all_decoded and self._admits_none(ended, published=len(plan.prefilling) > 0)

    def _repeat(self, next_arrival: float | None) -> bool:
        """Take at once all steps that repeat this one: all running requests decode, and none is admitted.

        They stop when a request ends, before blocks run out, and when a request arrives that could be admitted. Returns
        whether there are more such steps.
        """
        states, rows = self.states, self.scheduler.running
        if not len(rows):
            return False
        if next_arrival is None or (len(self.scheduler.waiting) and not self.may_overtake):
            next_arrival = inf
        if next_arrival <= self.now:
            return False
        known = states.num_tokens.take(rows)
        left = int(np.minimum.reduce(self.scheduler.max_len.take(rows) - known))
        times = self._times(min(left, MAX_REPEAT), len(rows), int(np.add.reduce(known)), next_arrival)
        steps = len(times) - 1
        while steps and not self.cache.grow_to(rows, known + (steps - 1)):
            steps //= 2
        if not steps:
            return False
        self.now = times[steps]
        self.between_tokens.add_differences(times[: steps + 1], len(rows))
        known += steps
        states.num_tokens[rows] = known
        known -= 1
        states.num_computed_tokens[rows] = known
        self.last_time[rows] = self.now
        self.num_steps += steps
        self.num_tokens += steps * len(rows)
        self.memory.add(self.now, self.cache.pool.num_used / (self.cache.pool.num_blocks - 1))
        return self._admits_none(steps == left and self._end(rows, known + 1))

    def _times(self, steps: int, num_reqs: int, context: int, until: float) -> list[float]:
        """Now, and the end of each decode step from now on, up to the first that is not before ``until``."""
        now, times = self.now, [self.now]
        while steps and now < until:  # one after the other, so that they are those of single steps to the last bit
            now += self.cost.seconds(num_reqs, context)
            times.append(now)
            context += num_reqs
            steps -= 1
        return times

    def _end(self, rows: I32, known: I32) -> bool:
        """Free those of the rows that have all their tokens. Whether there were any."""
        done = rows[known >= self.scheduler.max_len[rows]]
        if len(done):
            for row in done.tolist():
                del self.rows[self.scheduler.request_in(row).request_id]
            self.scheduler.finish(done)
        return len(done) > 0

    def _admits_none(self, ended: bool, *, published: bool = False) -> bool:
        """Whether the next step admits no waiting request: the last one tried, and the conditions have not improved.

        ended: a request ended. published: a prompt was computed, so that its blocks can be shared now.
        """
        if not len(self.scheduler.waiting):
            return True
        blocked = self.scheduler.ledger.blocked
        if ended or blocked is None:
            return False
        return blocked.code == "max_num_seqs" or (blocked.code == "no_blocks" and not published)

    def _note_moves(self, plan: StepPlan) -> None:
        for request in plan.preempted:
            self.num_preemptions += 1
            self.waiting_since[request.request_id] = float(self.last_time[self.rows.pop(request.request_id)])
        for request in plan.admitted:
            row, name = request.row, request.request_id
            self.rows[name] = row
            self.has_token[row] = len(request.output) > 0
            self.last_time[row] = self.waiting_since.pop(name)
            if not request.num_preemptions:
                self.num_prompt += len(request.prompt)
                self.num_cached += request.num_cached
