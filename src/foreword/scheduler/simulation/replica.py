"""One replica: the real scheduler and cache, with a clock instead of a model."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import cast

import numpy as np

from foreword.arrays import F64, I32
from foreword.batch import RequestStates
from foreword.errors import ConfigError
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.simulation.cost import CostModel
from foreword.scheduler.simulation.report import SimulationReport
from foreword.scheduler.simulation.rows import Rows, SimulatedCache, SimulatedRequest, piece_size, simulated_request
from foreword.scheduler.simulation.statistics import TimeSeries
from foreword.scheduler.simulation.trace import Arrival

# Under lasting overload the rest of the queue stays outside the scheduler, so that memory stays flat.
MAX_WAITING = 4096
# Limit of steps simulated at once, so that the list of their times stays small.
MAX_REPEAT = 1024


class Replica:
    """Serves what was `submit`ted, in the order of time, as far as `advance` is told that all arrivals are known.

    Several replicas may count into one report. memory_use: gets the share of blocks with an owner. ended: the numbers
    of requests that have ended, which the caller clears.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        config: SchedulerConfig,
        cost: CostModel,
        prefix_caching: bool,
        report: SimulationReport,
        memory_use: TimeSeries | None = None,
    ) -> None:
        if max_model_len < 2:
            raise ConfigError(f"max_model_len={max_model_len}: must hold a prompt token and an output token")
        if num_blocks > 1 and max_model_len > (num_blocks - 1) * block_size:  # before memory for it is allocated
            raise ConfigError(
                f"max_model_len={max_model_len}: {num_blocks} blocks of {block_size} hold "
                f"{(num_blocks - 1) * block_size} tokens, one block being the null block; use at most that, or raise "
                "num_blocks"
            )
        self.rows = Rows(config.max_num_seqs, max_model_len, block_size)
        self.cache = SimulatedCache(self.rows, num_blocks, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(cast(RequestStates, self.rows), self.cache, config)
        self.cost, self.report, self._memory_use = cost, report, memory_use
        self.now = self.busy = 0.0
        self.ended: list[int] = []
        # Whether an arriving request may be admitted before the waiting ones.
        self._may_overtake = config.policy != "fcfs"
        self._pending: deque[tuple[int, Arrival]] = deque()
        self._piece = piece_size(block_size)
        self._last_token = np.zeros(config.max_num_seqs)  # by row: when its last token came
        self._has_token = np.zeros(config.max_num_seqs, np.bool_)
        self._repeats = False  # whether the next step repeats the one before
        self._share = 1 / (num_blocks - 1)

    @property
    def num_unfinished(self) -> int:
        return len(self._pending) + len(self.scheduler.waiting) + len(self.scheduler.running)

    def submit(self, index: int, arrival: Arrival) -> None:
        """The request with this number comes. Its time is not before those submitted earlier."""
        self._pending.append((index, arrival))

    def advance(self, until: float) -> float:
        """Begin every step before ``until``; all arrivals before that time are known.

        Returns a time before which no further request ends; infinity when nothing is left.
        """
        scheduler, pending = self.scheduler, self._pending
        while True:
            if pending:
                if not scheduler.has_work:
                    self.now = max(self.now, pending[0][1].time)
                self._enter()
            elif not scheduler.has_work:
                return inf
            if self.now >= until:
                return self._next_end()
            if self._repeats:
                self._repeats = self._repeat(until)
            else:
                self._repeats = self._step(scheduler.schedule())

    def _enter(self) -> None:
        """Queue the requests that have come by now."""
        pending, waiting = self._pending, self.scheduler.waiting
        while pending and pending[0][1].time <= self.now and len(waiting) < MAX_WAITING:
            index, arrival = pending.popleft()
            self.scheduler.add(simulated_request(arrival, index, self.rows.max_model_len, self._piece))
            if self._may_overtake or len(waiting) == 1:
                self._repeats = False

    def _next_end(self) -> float:
        rows = self.scheduler.running
        if not self._repeats or not len(rows):
            return self.now
        known = self.rows.num_tokens.take(rows)
        left = int(np.minimum.reduce(self.scheduler.max_len.take(rows) - known))
        return self.now + left * self.cost.seconds(len(rows), int(np.add.reduce(known)))

    def _step(self, plan: StepPlan) -> bool:
        """Take the step. Returns whether the next one repeats it: all requests decoded, and none can be admitted."""
        states, rows, report = self.rows, plan.rows, self.report
        if plan.admitted or plan.preempted:
            self._note_moves(plan)
        computed = states.num_computed_tokens[rows] + plan.num_scheduled
        self._pass(self.cost.seconds(plan.num_tokens, int(np.add.reduce(computed))))
        states.num_computed_tokens[rows] = computed
        sampled = rows
        if len(plan.prefilling):
            sampled = rows[computed == states.num_tokens[rows]]
        known = states.num_tokens[sampled] + 1
        states.num_tokens[sampled] = known
        self.scheduler.commit(plan)

        waited = self.now - self._last_token[sampled]
        if plan.admitted or len(plan.prefilling):
            had_token = self._has_token[sampled]
            for row in sampled[~had_token].tolist():
                cast(SimulatedRequest, self.scheduler.request_in(row)).first_token = self.now
            waited = waited[had_token]
            self._has_token[sampled] = True
        report.time_between_tokens.add(waited)
        self._last_token[sampled] = self.now
        report.num_steps += 1
        report.num_output_tokens += len(sampled)
        self._note_memory()
        all_decoded = len(sampled) == len(self.scheduler.running)
        ended = self._end(sampled, known)
        return all_decoded and self._admits_none(ended, published=len(plan.prefilling) > 0)

    def _repeat(self, until: float) -> bool:
        """Take at once all steps that repeat this one: all running requests decode, and none is admitted.

        They stop when a request ends, before blocks run out, when a request arrives that could be admitted, and at
        ``until``. Returns whether there are more such steps.
        """
        states, rows, report = self.rows, self.scheduler.running, self.report
        if not len(rows):
            return False
        if self._pending and (self._may_overtake or not len(self.scheduler.waiting)):
            until = min(until, self._pending[0][1].time)
        if until <= self.now:
            return False
        known = states.num_tokens.take(rows)
        left = int(np.minimum.reduce(self.scheduler.max_len.take(rows) - known))
        times = self._times(min(left, MAX_REPEAT), len(rows), int(np.add.reduce(known)), until)
        steps = len(times) - 1
        while steps and not self.cache.grow_to(rows, known + (steps - 1)):
            steps //= 2
        if not steps:
            return False
        report.time_between_tokens.add(times[1 : steps + 1] - times[:steps], len(rows))
        self._pass(0.0, float(times[steps]))
        known += steps
        states.num_tokens[rows] = known
        known -= 1
        states.num_computed_tokens[rows] = known
        self._last_token[rows] = self.now
        report.num_steps += steps
        report.num_output_tokens += steps * len(rows)
        self._note_memory()
        return self._admits_none(steps == left and self._end(rows, known + 1))

    def _times(self, steps: int, num_reqs: int, context: int, until: float) -> F64:
        """Now, and the end of each decode step from now on, up to the first that is not before ``until``."""
        first = self.cost.seconds(num_reqs, context)
        if first > 0 and until < inf:
            steps = min(steps, int((until - self.now) / first) + 2)
        times = np.empty(steps + 1)
        times[0] = self.now
        base = self.cost.step + self.cost.token * num_reqs
        np.add(base, self.cost.context * np.arange(context, context + steps * num_reqs, num_reqs), out=times[1:])
        np.add.accumulate(times, out=times)  # one after the other, so that they are those of single steps
        return times[: int(times[:-1].searchsorted(until)) + 1]

    def _end(self, rows: I32, known: I32) -> bool:
        """Free those of the rows that have all their tokens. Whether there were any."""
        done = rows[known >= self.scheduler.max_len[rows]]
        if not len(done):
            return False
        for row in done.tolist():
            request = cast(SimulatedRequest, self.scheduler.request_in(row))
            self.report.add_times(request, self.now)
            self.ended.append(request.arrival)
        self.scheduler.finish(done)
        return True

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
        report = self.report
        for request in plan.preempted:
            assert isinstance(request, SimulatedRequest)
            report.num_preemptions += 1
            request.last_token = float(self._last_token[request.seat])
        for request in plan.admitted:
            assert isinstance(request, SimulatedRequest)
            row = request.seat = request.row
            self.rows.names[row] = request.names
            self._has_token[row] = request.first_token >= 0
            self._last_token[row] = request.last_token
            if not request.num_preemptions:
                report.num_prompt_tokens += len(request.prompt)
                report.num_cached_tokens += request.num_cached

    def _pass(self, seconds: float, until: float = 0.0) -> None:
        """Let time pass in a step, or until a moment."""
        then = until or self.now + seconds
        self.busy += then - self.now
        self.now = then

    def _note_memory(self) -> None:
        use = self.cache.pool.num_used * self._share
        self.report.peak_memory_use = max(self.report.peak_memory_use, use)
        if self._memory_use is not None:
            self._memory_use.add(self.now, use)
