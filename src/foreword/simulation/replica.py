"""One replica: the real scheduler and cache, with a clock instead of a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import cast

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch import RequestStates
from foreword.errors import ConfigError
from foreword.routing import make_router
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.pace import PromptPace
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.scheduler import Scheduler
from foreword.simulation.cost import CostModel
from foreword.simulation.report import SimulationReport
from foreword.simulation.rows import Rows, SimulatedCache, SimulatedRequest, piece_size, simulated_request
from foreword.simulation.trace import HASHED_TOKENS, Arrival

# Under lasting overload the rest of the queue stays outside the scheduler, so that memory stays flat.
MAX_WAITING = 4096
# Limit of steps simulated at once, so that the list of their times stays small.
MAX_REPEAT = 1024
MAX_REPLICAS = 10_000


@dataclass(slots=True, eq=False)
class _Decoding:
    """The start of a decode step: rows, known tokens, the sum of these, and steps until the first request ends."""

    rows: I64
    known: I32
    context: int
    steps_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal replicas and a router. tick: in seconds, see the module. Requests are cut to max_model_len, prompt first.

    hashed_tokens: the number of tokens that one hash id of an arrival represents.
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 64
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cost: CostModel = field(default_factory=CostModel)
    prefix_caching: bool = True
    num_replicas: int = 1
    router: str = "round-robin"
    tick: float = 0.25
    hashed_tokens: int = HASHED_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas={self.num_replicas}: must be from 1 to {MAX_REPLICAS}")
        if not 1e-3 <= self.tick <= 3600:
            raise ConfigError(f"tick={self.tick}: must be from 0.001 to 3600 seconds")
        make_router(self.router, 1)
        Replica(self, SimulationReport())


class Replica:
    """Serves the requests given to `submit`, in the order of time, up to the time given to `advance`.

    Several replicas may share a report. A single replica also reports the share of blocks in use. ended: the numbers of
    the requests that have ended; the caller clears this list.
    """

    def __init__(self, fleet: Fleet, report: SimulationReport) -> None:
        max_model_len, num_blocks, block_size = fleet.max_model_len, fleet.num_blocks, fleet.block_size
        config = fleet.config
        if max_model_len < 2:
            raise ConfigError(f"max_model_len={max_model_len}: must hold a prompt token and an output token")
        if num_blocks > 1 and max_model_len > (num_blocks - 1) * block_size:  # before memory for it is allocated
            raise ConfigError(
                f"max_model_len={max_model_len}: {num_blocks} blocks of {block_size} hold "
                f"{(num_blocks - 1) * block_size} tokens, one block being the null block; use at most that, or raise "
                "num_blocks"
            )
        self.rows = Rows(config.max_num_seqs, max_model_len, block_size)
        self.cache = SimulatedCache(
            self.rows, num_blocks, prefix_caching=fleet.prefix_caching, hashed_tokens=fleet.hashed_tokens
        )
        self.scheduler = Scheduler(cast(RequestStates, self.rows), self.cache, config)
        overhead = fleet.cost.step / fleet.cost.token if fleet.cost.token else inf
        self.scheduler.pace = PromptPace(config.bounded_share, overhead)
        self.cost, self.report = fleet.cost, report
        self._memory_use = report.memory_use if fleet.num_replicas == 1 else None
        self.now = self.busy = 0.0
        self.ended: list[int] = []
        # True if an arriving request may be admitted before the waiting ones.
        self._may_overtake = config.policy != "fcfs"
        self._pending: deque[tuple[int, Arrival]] = deque()
        self._block_size, self._piece = block_size, piece_size(block_size, fleet.hashed_tokens)
        self._hashed_tokens = fleet.hashed_tokens
        self._last_token = np.zeros(config.max_num_seqs)  # by row: the time of its last token
        self._has_token = np.zeros(config.max_num_seqs, np.bool_)
        self._repeats = False  # whether the next step repeats the one before
        self._decoding = _Decoding(np.zeros(0, np.intp), np.zeros(0, np.int32), 0, 0)  # if it does
        self._share = 1 / (num_blocks - 1)

    @property
    def num_unfinished(self) -> int:
        return len(self._pending) + len(self.scheduler.waiting) + len(self.scheduler.running)

    def submit(self, index: int, arrival: Arrival) -> None:
        """Add the arrival with this number. Arrivals must be added in the order of time."""
        self._pending.append((index, arrival))

    def advance(self, until: float) -> float:
        """Begin every step before ``until``. All arrivals before that time must be known.

        Return a lower bound of the time at which the next step that ends a request begins; infinity if there is none.
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
                if not pending and (end := self._next_end()) >= until:
                    return end
                self._repeats = self._repeat(until)
            else:
                self._repeats = self._step(scheduler.schedule())

    def _enter(self) -> None:
        """Queue the requests that have come by now."""
        pending, waiting = self._pending, self.scheduler.waiting
        while pending and pending[0][1].time <= self.now and len(waiting) < MAX_WAITING:
            index, arrival = pending.popleft()
            self.scheduler.add(
                simulated_request(arrival, index, self.rows.max_model_len, self._piece, self._hashed_tokens)
            )
            if self._may_overtake or len(waiting) == 1:
                self._repeats = False

    def _next_end(self) -> float:
        """Return a lower bound of the time at which the next step that ends a request begins."""
        if not self._repeats:
            return self.now
        decoding, size = self._decoding, self._block_size
        count, steps_left = len(decoding.rows), decoding.steps_left - 1
        if self.cache.pool.num_free * size < count * (steps_left + size):  # a preemption would make steps shorter
            return self.now
        growth = self.cost.context * count * steps_left * (steps_left - 1) / 2
        return self.now + steps_left * self.cost.seconds(count, decoding.context) + growth

    def _step(self, plan: StepPlan) -> bool:
        """Run a step. Return whether the next step repeats it: all requests decoded, and none can be admitted."""
        states, rows, report = self.rows, plan.rows.astype(np.intp), self.report
        if plan.admitted or plan.preempted:
            self._note_moves(plan)
        computed = states.num_computed_tokens[rows] + plan.num_scheduled
        self._pass(self.now + self.cost.seconds(plan.num_tokens, sum(computed.tolist())))
        states.num_computed_tokens[rows] = computed
        sampled, known = rows, states.num_tokens[rows]
        if len(plan.prefilling):
            is_sampled = computed == known
            sampled, known = rows[is_sampled], known[is_sampled]
        known += 1
        states.num_tokens[sampled] = known
        self.scheduler.commit(plan)

        waited = self.now - self._last_token[sampled]
        if plan.admitted or len(plan.prefilling):
            had_token = self._has_token[sampled]
            for row in sampled[~had_token].tolist():
                cast(SimulatedRequest, self.scheduler.running.request_in(row)).first_token = self.now
            waited = waited[had_token]
            self._has_token[sampled] = True
        report.time_between_tokens.add(waited.tolist())
        self._last_token[sampled] = self.now
        report.num_steps += 1
        report.num_output_tokens += len(sampled)
        self._note_memory()
        all_decoded = len(sampled) == len(self.scheduler.running)
        ended = self._end(sampled, known)
        if not (all_decoded and self._admits_none(ended, published=len(plan.prefilling) > 0)):
            return False
        return len(self._decoding.rows) > 0

    def _repeat(self, until: float) -> bool:
        """Run all steps that repeat this one at once: all running requests decode, and none is admitted.

        The repetition stops when a request ends, before blocks run out, when a request arrives that could be admitted,
        and at ``until``. Return whether more such steps follow.
        """
        states, decoding, report = self.rows, self._decoding, self.report
        if self._pending and (self._may_overtake or not len(self.scheduler.waiting)):
            until = min(until, self._pending[0][1].time)
        rows, known = decoding.rows, decoding.known
        times = self._times(until)
        steps = len(times) - 1
        while steps and not self.cache.grow_to(rows, known + (steps - 1)):
            steps //= 2
        if not steps:
            return False
        del times[steps + 1 :]
        report.time_between_tokens.add([after - before for before, after in pairwise(times)], len(rows))
        self._pass(times[steps])
        known += steps
        states.num_tokens[rows] = known
        states.num_computed_tokens[rows] = known - 1
        self._last_token[rows] = self.now
        report.num_steps += steps
        report.num_output_tokens += steps * len(rows)
        self._note_memory()
        if steps < decoding.steps_left:
            decoding.context += steps * len(rows)
            decoding.steps_left -= steps
            return self._admits_none(False)
        return self._admits_none(self._end(rows, known)) and len(self._decoding.rows) > 0

    def _times(self, until: float) -> list[float]:
        """Return the present time and the end of each following decode step, up to the first end at or after
        ``until``.
        """
        now, count, context = self.now, len(self._decoding.rows), self._decoding.context
        times, most = [now], min(self._decoding.steps_left, MAX_REPEAT)
        fixed, per_token = self.cost.step + self.cost.token * count, self.cost.context
        while now < until and len(times) <= most:
            now += fixed + per_token * context
            context += count
            times.append(now)
        return times

    def _end(self, rows: I64, known: I32) -> bool:
        """Free the rows that have all of their tokens. Return whether there were any; the other rows continue to
        decode.
        """
        tokens_left = self.scheduler.running.max_len[rows] - known
        if ended := min(tokens_left.tolist(), default=1) < 1:
            stays = tokens_left > 0
            done = rows[~stays].astype(np.int32)
            for row in done.tolist():
                request = cast(SimulatedRequest, self.scheduler.running.request_in(row))
                if request.is_measured:
                    self.report.add_times(request, self.now)
                self.ended.append(request.arrival)
            self.scheduler.finish(done)
            rows, known, tokens_left = rows[stays], known[stays], tokens_left[stays]
        self._decoding = _Decoding(rows, known, sum(known.tolist()), min(tokens_left.tolist(), default=0))
        return ended

    def _admits_none(self, ended: bool, *, published: bool = False) -> bool:
        """Return whether the next step admits no waiting request, because the last step admitted none and no condition
        has improved since.

        ended: whether a request ended. published: whether a prompt was computed, so that its blocks can now be shared.
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

    def _pass(self, then: float) -> None:
        """Advance the clock by the time of steps."""
        self.busy += then - self.now
        self.now = then

    def _note_memory(self) -> None:
        use = self.cache.pool.num_used * self._share
        self.report.peak_memory_use = max(self.report.peak_memory_use, use)
        if self._memory_use is not None:
            self._memory_use.add(self.now, use)
