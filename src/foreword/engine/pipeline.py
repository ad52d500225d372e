"""Prepares and launches steps; a second thread can prepare the next step while one runs.

    depth 1     prepare t ─▶ run t ─▶ commit t ─▶ prepare t+1 ─▶ run t+1 …
    depth 2     run t ──────────────▶ commit t ─▶ resolve t+1 ─▶ run t+1 ───────────▶ …      caller
                └─ plan, prepare t+1 ┄┄┄┄┄┄┄┄┄┄┄┄┘               └─ plan, prepare t+2 ┄      planner thread
    ahead       plan, prepare, launch t+1 ─▶ await t ─▶ commit t ─▶ resolve t+1 ─▶ launch t+2 ─▶ …      caller
                t ──────────────────────────▶ t+1 ─────────────────────────────▶ t+2 …                 device

A host executor computes in the caller's thread and releases the interpreter lock, so that no thread has to wake up
between two runs. A device that keeps samples gets the next step before they are read (`Executor.runs_ahead`).

Resolving updates a step prepared early with the committed samples: tokens replace placeholders, proposed drafts fill
the reserved draft slots, and unused slots and ended requests are left out. Samples of ended requests are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreword.arrays import I64
from foreword.batch import (
    Check,
    InputBatch,
    InputBuffers,
    RequestStates,
    StagingRing,
    prepare_inputs,
    resolve,
    step_needs,
)
from foreword.engine.grammar_thread import GrammarThread
from foreword.engine.planner_thread import PlannerThread
from foreword.executors import Executor, PendingStep
from foreword.sampling import Grammar, Processors, Sampled, StepSampling
from foreword.scheduler import StepPlan


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A planned and prepared step.

    pending: None before it is launched. runs_ahead: see `Executor.runs_ahead`, once it is launched.
    kept: of the requests that it was launched with, those that had not ended when it was resolved; None: all.
    """

    plan: StepPlan
    batch: InputBatch
    buffers: InputBuffers
    pending: PendingStep | None = None
    runs_ahead: bool = False
    kept: I64 | None = None

    def result(self) -> Sampled:
        """Wait for the samples of the requests in ``batch``."""
        assert self.pending is not None
        sampled = self.pending.result()
        return sampled if self.kept is None else sampled.of_requests(self.kept)


class Pipeline:
    """``depth`` sets of buffers, and the logits processors and grammars that steps are sampled with.

    grammars: by state row, of the requests that have one.
    """

    def __init__(
        self,
        states: RequestStates,
        executor: Executor,
        processors: Processors,
        *,
        max_num_batched_tokens: int,
        depth: int,
        check: Check = "off",
    ) -> None:
        self.states, self.executor, self.processors, self.check = states, executor, processors, check
        self.grammars: dict[int, Grammar] = {}
        self.grammar_thread = GrammarThread()
        self._depth = depth
        self._ring = StagingRing(states, max_num_batched_tokens=max_num_batched_tokens, depth=depth)
        self._thread: PlannerThread[InFlightStep] | None = None

    def prepare(self, plan: StepPlan) -> InFlightStep:
        """Return the tensors of a plan.

        Prepared during a step in flight, they need `resolve` before they are launched.
        """
        if plan.admitted:
            self.processors.update()
        buffers = self._ring.acquire()
        return InFlightStep(plan, self._batch(plan, buffers), buffers)

    def resolve(self, step: InFlightStep, plan: StepPlan) -> None:
        """Update a step after the commit of the one before; ``plan``: the result of `Scheduler.resolve`."""
        if plan is step.plan:
            resolve(step.batch)
        else:
            if step.pending is not None:
                step.kept = self.states.live[step.plan.rows].nonzero()[0]
            step.plan, step.batch = plan, self._batch(plan, step.buffers)

    def _batch(self, plan: StepPlan, buffers: InputBuffers) -> InputBatch:
        return prepare_inputs(
            self.states,
            (plan.rows, plan.num_scheduled),
            buffers,
            draft_tokens=plan.draft_tokens,
            pad_to=self.executor.pad_for(plan.num_tokens, len(plan.rows)),
            gather_block_tables=self.executor.reads_gathered_tables,
            block_ops=plan.block_ops,
            check=self.check,
        )

    def forget_grammars(self) -> None:
        """Forget the grammars of rows without a request."""
        for row in [row for row in self.grammars if not self.states.live[row]]:
            del self.grammars[row]

    def launch(self, step: InFlightStep) -> None:
        """Start the step on the executor; its token masks are computed meanwhile."""
        batch, masks = step.batch, None
        if self.grammars:
            masks = self.grammar_thread.masks(batch, self.grammars, self.states.vocab_size)
        self._launch(step, self.processors.step(step_needs(batch), masks))

    def launch_ahead(self, step: InFlightStep) -> None:
        """Start a step that is not resolved, unless its sampling needs the tokens of the step before."""
        if not self.grammars:
            sampling = self.processors.step(step_needs(step.batch), None)
            if self.executor.runs_ahead(sampling):
                self._launch(step, sampling)

    def _launch(self, step: InFlightStep, sampling: StepSampling) -> None:
        step.runs_ahead = self._depth > 1 and self.executor.runs_ahead(sampling)
        step.pending = self.executor.launch(step.batch, sampling)

    def overlap(self, work: Callable[[], InFlightStep | None]) -> PlannerThread[InFlightStep]:
        """Run ``work`` in the planner thread, while the caller waits for a step."""
        if self._thread is None:
            self._thread = PlannerThread()
        self._thread.start(work)
        return self._thread

    def release(self, step: InFlightStep) -> None:
        """Free the buffers of a step that is committed or will not run."""
        self.grammar_thread.wait()
        self._ring.release(step.buffers)

    def reset(self) -> None:
        """Forget all steps that are planned or in flight, whatever an interrupt left behind; no row holds a request."""
        if self._thread is not None:
            self._thread.settle()
        self.grammar_thread.reset()
        self._ring.release_all()
        self.grammars.clear()

    def close(self) -> None:
        """End the threads."""
        self.grammar_thread.close()
        if self._thread is not None:
            self._thread.close()
            self._thread = None
