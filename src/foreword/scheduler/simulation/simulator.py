"""The real scheduler and cache under a recorded load, with a clock instead of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foreword.batch import KVGroup, RequestStates
from foreword.batch.sampling import SamplingParams
from foreword.cache import KVCache
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.simulation.cost import CostModel
from foreword.scheduler.simulation.statistics import LatencyHistogram, Series
from foreword.scheduler.simulation.trace import Arrival

GREEDY = SamplingParams(temperature=0.0)
# Under lasting overload the rest of the queue stays in the trace, so that memory stays flat.
MAX_WAITING = 4096


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What a run came to. Times are simulated seconds; memory_use is the share of blocks with an owner."""

    num_requests: int
    num_steps: int
    seconds: float
    num_output_tokens: int
    time_to_first_token: LatencyHistogram
    time_between_tokens: LatencyHistogram
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    memory_use: Series
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
    """
    config = config or SchedulerConfig()
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
        self.cache = KVCache(states, num_blocks, prefix_caching=prefix_caching, partial_reuse=False)
        self.scheduler = Scheduler(states, self.cache, config)
        self.now = 0.0
        self.num_steps = self.num_tokens = self.num_preemptions = self.num_prompt = self.num_cached = 0
        self.num_requests = 0
        self.first_token, self.between_tokens, self.memory = LatencyHistogram(), LatencyHistogram(), Series()
        self.last_time = np.zeros(states.max_num_reqs)  # by row: when its last token came, or the request itself
        self.has_token = np.zeros(states.max_num_reqs, np.bool_)
        self.waiting_since: dict[str, float] = {}  # waiting requests: their arrival, or their last token
        self.rows: dict[str, int] = {}  # running requests

    def run(self, arrivals: Iterable[Arrival]) -> SimulationReport:
        pending = iter(arrivals)
        following = next(pending, None)
        while following is not None or self.scheduler.has_work:
            if not self.scheduler.has_work and following is not None:
                self.now = max(self.now, following.time)
            while following is not None and following.time <= self.now and len(self.scheduler.waiting) < MAX_WAITING:
                self._arrive(following)
                following = next(pending, None)
            plan = self.scheduler.schedule()
            self._step(plan)
            if not len(plan.prefilling) and len(plan.rows) == len(self.scheduler.running):
                self._repeat(None if following is None else following.time)
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
        prompt = arrival.prompt(index)[: limit - 1]
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

    def _step(self, plan: StepPlan) -> None:
        states, rows = self.states, plan.rows
        self._note_moves(plan)
        computed = states.num_computed_tokens[rows] + plan.num_scheduled
        self.now += self.cost.seconds(plan.num_tokens, int(computed.sum()))
        states.num_computed_tokens[rows] = computed
        sampled = rows[computed == states.num_tokens[rows]]
        states.num_tokens[sampled] += 1
        self.scheduler.commit(plan)

        waited = self.now - self.last_time[sampled]
        first = ~self.has_token[sampled]
        if first.any():
            self.first_token.add(waited[first])
        self.between_tokens.add(waited[~first])
        self.last_time[sampled] = self.now
        self.has_token[sampled] = True
        self.num_steps += 1
        self.num_tokens += len(sampled)
        self.memory.add(self.now, self.cache.pool.num_used / (self.cache.pool.num_blocks - 1))
        done = sampled[states.num_tokens[sampled] >= self.scheduler.max_len[sampled]]
        if len(done):
            for row in done.tolist():
                del self.rows[self.scheduler.request_in(row).request_id]
            self.scheduler.finish(done)

    def _repeat(self, next_arrival: float | None) -> None:
        """All running requests decoded, and nobody left: do in one go the steps that would only repeat this one.

        They end before the first request does, before blocks run out, and before somebody arrives who could be let in.
        """
        states, rows, cost = self.states, self.scheduler.running, self.cost
        known = states.num_tokens[rows]
        steps = int((self.scheduler.max_len[rows] - known).min()) - 1
        context = int(known.sum())
        if not len(self.scheduler.waiting) and next_arrival is not None:
            later = cost.seconds(len(rows), context + steps * len(rows))
            steps = min(steps, int((next_arrival - self.now) / later))
        while steps > 0:
            wanted = self.cache.wanted(rows, known - 1 + steps)
            if sum(int(w.sum()) for w in wanted) <= self.cache.pool.num_free:
                break
            steps //= 2
        if steps < 1:
            return
        self.cache.grow(rows, wanted)
        duration = cost.decode_seconds(steps, len(rows), context)
        self.now += duration
        states.num_tokens[rows] += steps
        states.num_computed_tokens[rows] += steps
        self.between_tokens.add_many(duration / steps, steps * len(rows))
        self.last_time[rows] = self.now
        self.num_steps += steps
        self.num_tokens += steps * len(rows)
        self.memory.add(self.now, self.cache.pool.num_used / (self.cache.pool.num_blocks - 1))

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
