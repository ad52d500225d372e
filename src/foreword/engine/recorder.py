"""An observer that records an engine's steps: to a file, and the last ones in memory for when a step fails."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.batch import InputBatch, RequestStates
from foreword.engine.config import EngineConfig
from foreword.engine.observer import EngineObserver
from foreword.engine.outputs import RequestOutput
from foreword.errors import ConfigError, RequestError, reason_of
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan
from foreword.trace.capture import Capture
from foreword.trace.destination import Destination
from foreword.trace.header import TokenIds, TraceHeader
from foreword.trace.ring import FlightRing

if TYPE_CHECKING:
    from foreword.trace.background import BackgroundTrace

MAX_FAILURES = 3
"""Files of failed steps that one engine writes."""
_LOGGER = logging.getLogger("foreword.engine")


class EngineRecorder(EngineObserver):
    """Records steps as the engine's settings say, from its first request on.

    The file is written by a thread; the engine goes on if it cannot be. A failed step adds a note to its error with the
    name of the file that has the last steps. The time of events is that of the engine's start.
    """

    def __init__(self, states: RequestStates, config: EngineConfig) -> None:
        """ConfigError if the file cannot be made."""
        self._states, self._config = states, config
        self._capture = Capture(states)
        self._ring = FlightRing(config.flight_steps) if config.flight_steps else None
        self._start, self._started = time.perf_counter(), time.time()
        self._num_steps = self._num_failures = 0
        self._planned_at = 0.0
        self._is_torn = False  # whether events may be missing since the last step
        self._plan: StepPlan | None = None  # of the last step, if it may be repeated
        self._values: Callable[[InputBatch], dict[str, Any]] | None = None
        self._file = None if config.record is None else self._open(config.record)

    def close(self) -> None:
        """Write what is recorded so far."""
        self._push(is_step=False)
        if self._file is not None:
            self._file.flush()

    # -- called by the engine ------------------------------------------------------------------------------------------

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        self._capture.arrive(request_id, num_prompt_tokens, self._now())

    def request_ended(self, output: RequestOutput) -> None:
        reasons = dict.fromkeys(c.finish_reason or "error" for c in output.outputs)
        self._capture.end(output.request_id, ", ".join(reasons), self._now())

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self._planned_at = now = self._now()
        ring, file = self._ring, self._file
        if self._is_torn or (ring is not None and ring.wants_snapshot) or (file is not None and file.wants_snapshot):
            self._begin()
            self._plan = None
        every = self._config.record_tensors
        if self._values is not None and every and self._num_steps % every == 0:
            self._step(plan, batch, now, self._values(batch))
        elif plan is self._plan:  # which the scheduler repeats only as long as it needs no other blocks
            self._capture.repeat(now)
        else:
            self._step(plan, batch, now, None)
        self._num_steps += 1
        self._push(is_step=True)

    def _step(self, plan: StepPlan, batch: InputBatch, now: float, tensors: Mapping[str, Any] | None) -> None:
        preempted = {request.request_id for request in plan.preempted} if plan.preempted else ()
        self._capture.step(batch, preempted=preempted, tensors=tensors, time=now)
        repeats = plan.draft_tokens is None and not len(plan.prefilling) and plan.num_tokens == len(plan.rows)
        self._plan = plan if repeats and not batch.block_ops else None

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        logprobs = None
        if sampled.logprobs and self._file is not None:
            logprobs = {
                b: [entry[token].logprob for entry, token in zip(entries, tokens, strict=False)]
                for b, entries in sampled.logprobs.items()
                if (tokens := sampled.token_ids[b : b + 1].ravel().tolist())
            }
        self._capture.commit(sampled.token_ids, logprobs, model_ms=(self._now() - self._planned_at) * 1e3)

    def step_failed(self, error: BaseException) -> None:
        self._plan = None
        if not isinstance(error, Exception):  # an interrupt, perhaps in the middle of a call of this observer
            self._is_torn = True
            if self._file is not None:
                self._file.lost = f"the engine was interrupted ({type(error).__name__})"
            return
        self._capture.fail(f"{type(error).__name__}: {error}"[:1000], self._now())
        self._push(is_step=False)
        if self._ring is not None and not isinstance(error, RequestError):
            self._write_ring(self._ring, error)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _push(self, *, is_step: bool) -> None:
        captured = self._capture.take()
        if self._ring is not None:
            self._ring.add(captured, is_step=is_step)
        if self._file is not None:
            self._file.put(captured)

    def _begin(self) -> None:
        snapshot, step = self._capture.snapshot(), self._num_steps + 1
        self._push(is_step=False)
        if self._ring is not None and (self._ring.wants_snapshot or self._is_torn):
            self._ring.begin(snapshot, step, forgets=self._is_torn)
        self._is_torn = False
        if self._file is not None and self._file.wants_snapshot:
            self._file.begin(snapshot, step)

    def _header(self, token_ids: TokenIds) -> TraceHeader:
        return TraceHeader.of_states(
            self._states,
            self._config.scheduler.max_num_batched_tokens,
            engine="foreword",
            token_ids=token_ids,
            started=round(self._started, 3),
        )

    def _open(self, record: str) -> BackgroundTrace:
        from foreword.trace.background import BackgroundTrace  # here: few engines record to a file
        from foreword.trace.tensors import copied_values

        self._values = copied_values
        to = Destination.of(record)
        header = self._header(self._config.record_token_ids or "plain")
        try:
            return BackgroundTrace(to.path, header, _LOGGER.error, max_bytes=to.max_bytes)
        except OSError as error:
            raise ConfigError(f"record={record!r}: cannot be written ({reason_of(error)})") from None

    def _write_ring(self, ring: FlightRing, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            return
        folder, name = self._config.flight_folder, f"foreword-{os.getpid()}-step-{self._num_steps}-"
        try:
            descriptor, made = tempfile.mkstemp(".jsonl.gz", name, folder)  # for this user alone
            os.close(descriptor)
            path = Path(made)
            count = ring.write(path, self._header(self._config.record_token_ids or "hashed"))
        except Exception as fault:  # the step's own error is the one to raise
            _LOGGER.error("a step failed, and the last steps could not be written: %s", fault)
            return
        where = f"the last {count} steps are in {path}: `foreword conform {path}` replays them"
        error.add_note(where)
        _LOGGER.error("a step failed (%s: %s); %s", type(error).__name__, error, where)

    def _now(self) -> float:
        return time.perf_counter() - self._start
