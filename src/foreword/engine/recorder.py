"""An observer that records an engine's steps: to a file, and the last ones in memory for when a step fails."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.batch import InputBatch, RequestStates
from foreword.cache import CacheMiss, salt_of
from foreword.engine.config import EngineConfig
from foreword.engine.loras import Loras
from foreword.engine.observer import EngineObserver
from foreword.engine.outputs import RequestOutput
from foreword.errors import ConfigError, RequestError, reason_of
from foreword.sampling import Sampled
from foreword.scheduler import Ledger, StepPlan
from foreword.trace.capture import Capture
from foreword.trace.destination import Destination
from foreword.trace.header import TokenIds, TraceHeader
from foreword.trace.ring import FlightRing, Place, Recent

if TYPE_CHECKING:
    from foreword.trace.background import BackgroundTrace

MAX_FAILURES = 3
"""Files of failed steps that one engine writes."""


class EngineRecorder(EngineObserver):
    """Records steps as the engine's settings say, from its first request on.

    The file is written by a thread; the engine goes on if it cannot be. A failed step adds a note to its error with the
    name of the file that has the last steps. The time of events is that of the engine's start.
    """

    def __init__(
        self,
        states: RequestStates,
        config: EngineConfig,
        *,
        loras: Loras,
        num_blocks: int,
        clock: Callable[[], float],
        refined: Callable[[CacheMiss], CacheMiss],
    ) -> None:
        """Begin a trace with these parts of an engine. Raise ConfigError if the file cannot be made."""
        self._states, self._config, self._loras, self._num_blocks = states, config, loras, num_blocks
        self._capture = Capture(states)
        self._ring = FlightRing(config.flight_steps) if config.flight_steps else None
        self._clock, self._refined = clock, refined
        self._start, self._started = clock(), time.time()
        self._num_steps = self._num_failures = 0
        self._planned_at = self._ran_at = 0.0
        self._since = 0.0  # the end of the last step, or the arrival of the first request after it
        self._num_requests = 0
        self._num_kept = 0  # steps that the capture has, and neither the ring nor the file
        self._num_repeats = 0  # steps with the plan `_plan` that may stay there: a ring takes many at once
        self._is_torn = False  # whether events may be missing since the last step
        self._plan: StepPlan | None = None  # the last one, if its rows computed one token and nothing else
        self._blocked: tuple[str, str] = "", ""  # the first request that waits, and the kind of reason
        self._values: Callable[[InputBatch], dict[str, Any]] | None = None
        self._file = None if config.record is None else self._open(config.record)
        if self._file is not None:  # what the capture has is written also at the exit of a program without `close`
            weakref.finalize(self, _end, self._file, self._capture)

    def close(self) -> None:
        """Write what is recorded so far."""
        self._push()
        if self._file is not None:
            self._file.flush()

    def recent(self, place: Place | None = None) -> Recent | None:
        """Return what the ring kept since a place; None without a ring. Called in the engine's thread."""
        if self._ring is None:
            return None
        self._push()
        return self._ring.since(place)

    def header(self, token_ids: TokenIds) -> TraceHeader:
        """Return the header of a trace of the engine."""
        return TraceHeader.of_states(
            self._states,
            self._config.scheduler.max_num_batched_tokens,
            engine="foreword",
            token_ids=token_ids,
            started=round(self._started, 3),
            settings=self._settings(),
        )

    # -- called by the engine ------------------------------------------------------------------------------------------

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        now = self._now()
        if not self._num_requests:
            self._since = now
        self._num_requests += 1
        self._capture.arrive(request_id, num_prompt_tokens, now)

    def request_ended(self, output: RequestOutput) -> None:
        self._num_requests -= 1
        reasons = dict.fromkeys(c.finish_reason or "error" for c in output.outputs)
        arrival = output.metrics.arrival_time - self._start
        self._capture.end(output.request_id, ", ".join(reasons), self._now(), arrival)
        if not self._num_requests and self._file is not None:  # so that the file of an idle engine is complete
            self._push()

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self._planned_at = now = self._clock() - self._start
        if plan is self._plan and self._num_repeats:
            self._num_repeats -= 1
            self._capture.repeat(None, now)
            self._num_steps += 1
            self._num_kept += 1
            return
        ring, file = self._ring, self._file
        for request in plan.admitted:
            keys = request.keys.get(0, ())
            lora, salt = self._loras.request_of(request.lora_id), salt_of(keys)
            miss = None if request.cache_miss is None else self._refined(request.cache_miss)
            self._capture.identify(request.row, lora, salt, "" if miss is None else f"{miss.reason} at {miss.position}")
        self._push()
        if self._is_torn or (ring is not None and ring.wants_snapshot) or (file is not None and file.wants_snapshot):
            self._begin()
            self._plan = None
        self._waiting(plan.ledger)
        every = self._config.record_tensors
        if self._values is not None and every and self._num_steps % every == 0:
            self._step(plan, batch, now, self._values(batch))
        elif plan is self._plan:  # the scheduler repeats a plan while its rows need no further blocks
            self._capture.repeat(None, now)
        elif self._plan is not None and plan.rows is self._plan.rows and _only_decodes(plan, batch):
            self._capture.repeat(plan.rows, now)  # the same array means the same requests
            self._plan = plan
        else:
            self._step(plan, batch, now, None)
        self._num_steps += 1
        self._num_kept += 1
        self._push()
        self._num_repeats = ring.num_left if ring is not None and file is None else 0

    def _waiting(self, ledger: Ledger) -> None:
        """Keep which request is the first that waits, and why, if another one is, or for another kind of reason."""
        head, reason = ledger.head or "", ledger.blocked
        blocked = head, "" if reason is None else reason.code
        if blocked != self._blocked:  # the numbers of a reason alone change in many steps
            self._blocked = blocked
            self._capture.wait(head, "" if reason is None else str(reason))

    def _step(self, plan: StepPlan, batch: InputBatch, now: float, tensors: Mapping[str, Any] | None) -> None:
        preempted = {request.request_id for request in plan.preempted} if plan.preempted else ()
        self._capture.step(batch, preempted=preempted, tensors=tensors, time=now)
        self._plan = plan if _only_decodes(plan, batch) else None

    def step_ran(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self._ran_at = self._clock() - self._start

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        logprobs = None
        if sampled.logprobs and self._file is not None:
            logprobs = {
                b: [entry[token].logprob for entry, token in zip(entries, tokens, strict=False)]
                for b, entries in sampled.logprobs.items()
                if (tokens := sampled.token_ids[b : b + 1].ravel().tolist())
            }
        planned, ran, before, now = self._planned_at, self._ran_at, self._since, self._clock() - self._start
        self._since = now
        host = planned - before + now - ran
        self._capture.commit(sampled.token_ids, logprobs, 1e6 * host, 1e3 * (ran - planned))

    def step_failed(self, error: BaseException) -> None:
        self._plan, self._since = None, self._now()
        if not isinstance(error, Exception):  # an interrupt, perhaps in the middle of a call of this observer
            self._is_torn = True
            if self._file is not None:
                self._file.lost = f"the engine was interrupted ({type(error).__name__})"
            return
        self._capture.fail(f"{type(error).__name__}: {error}"[:1000], self._now())
        self._push()
        if self._ring is not None and not isinstance(error, RequestError):
            self._write_ring(self._ring, error)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _push(self) -> None:
        num_steps, self._num_kept = self._num_kept, 0
        nbytes, captured = self._capture.nbytes, self._capture.take()
        if self._ring is not None:
            self._ring.add(captured, nbytes, num_steps)
        if self._file is not None:
            self._file.put(captured)

    def _begin(self) -> None:
        snapshot, step = self._capture.snapshot(), self._num_steps + 1
        self._push()
        self._blocked = "", ""
        if self._ring is not None and (self._ring.wants_snapshot or self._is_torn):
            self._ring.begin(snapshot, step, forgets=self._is_torn)
        self._is_torn = False
        if self._file is not None and self._file.wants_snapshot:
            self._file.begin(snapshot, step)

    def _settings(self) -> dict[str, float | str | bool]:
        """Return what a simulation of the scheduler and the cache needs to know, and the trace does not say."""
        config = self._config
        found = {f.name: getattr(config.scheduler, f.name) for f in fields(config.scheduler)}
        found |= {"num_blocks": self._num_blocks, "prefix_caching": config.reuses_prefixes}
        found["chunked_prefill"] = config.scheduler.chunks_prompts
        found["policy"] = config.scheduler.order.name
        return found

    def _open(self, record: str) -> BackgroundTrace:
        from foreword.trace.background import BackgroundTrace  # here: few engines record to a file
        from foreword.trace.tensors import copied_values

        self._values = copied_values
        to = Destination.of(record)
        header = self.header(self._config.record_token_ids or "plain")
        try:
            return BackgroundTrace(to.path, header, _log_error, max_bytes=to.max_bytes)
        except OSError as error:
            raise ConfigError(f"record={record!r}: cannot be written ({reason_of(error)})") from None

    def _write_ring(self, ring: FlightRing, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            return
        folder, name = self._config.flight_folder, f"foreword-{os.getpid()}-step-{self._num_steps}-"
        try:
            import tempfile  # here: few engines write a failure

            descriptor, made = tempfile.mkstemp(".jsonl.gz", name, folder)  # for this user alone
            os.close(descriptor)
            path = Path(made)
            count = ring.write(path, self.header(self._config.record_token_ids or "hashed"))
        except Exception as fault:  # the step's own error is the one to raise
            _log_error("a step failed, and the last steps could not be written: %s", fault)
            return
        where = f"the last {count} steps are in {path}: `foreword conform {path}` replays them"
        error.add_note(where)
        _log_error("a step failed (%s: %s); %s", type(error).__name__, error, where)

    def _now(self) -> float:
        return self._clock() - self._start


def _log_error(text: str, *values: object) -> None:
    from logging import getLogger  # here: it imports a dozen modules, and few engines have something to tell

    getLogger("foreword.engine").error(text, *values)


def _end(file: BackgroundTrace, capture: Capture) -> None:
    file.end_with(capture.take())


def _only_decodes(plan: StepPlan, batch: InputBatch) -> bool:
    """Return whether each request of a step computes one token, and nothing else is done."""
    is_plain = plan.draft_tokens is None and not len(plan.prefilling) and not plan.preempted
    return is_plain and plan.num_tokens == len(plan.rows) and not batch.block_ops
