"""Prepares steps and runs them; a second thread can prepare the next one meanwhile.

    depth 1     prepare t ─▶ run t ─▶ commit t ─▶ prepare t+1 ─▶ run t+1 …
    depth 2     run t ──────────────▶ commit t ─▶ settle t+1 ─▶ run t+1 ────────────▶ …      caller
                └─ plan, prepare t+1 ┄┄┄┄┄┄┄┄┄┄┄┄┘              └─ plan, prepare t+2 ┄       helper

The model runs in the caller's thread and lets go of the interpreter there, so that nothing between two runs waits for
another thread to wake up.

Settling brings a step prepared early to the truth: tokens in place of placeholders, the drafts that were proposed
since in the places kept for them, and without places that stayed empty and requests that ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.batch import InputBatch, InputBuffers, RequestStates, StagingRing, prepare_inputs
from foreword.batch.proof.checker import Check
from foreword.engine.helper import Helper
from foreword.engine.prompt_logprobs import (
    PromptLogprobs,
    prompt_tokens,
    read_prompt_logprobs,
    with_more_logits,
)
from foreword.executors.executor import Executor
from foreword.sampling import Sampled, Sampler
from foreword.scheduler import StepPlan


@dataclass(slots=True, eq=False)
class Step:
    """A planned and prepared step.

    prompt_logprobs: what the run found out about prompts, for the rows that asked.
    """

    plan: StepPlan
    batch: InputBatch
    buffers: InputBuffers
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)


class Pipeline:
    """``depth`` sets of buffers, one executor, one sampler."""

    def __init__(
        self,
        states: RequestStates,
        executor: Executor,
        sampler: Sampler,
        *,
        max_num_batched_tokens: int,
        depth: int,
        check: Check = "off",
    ) -> None:
        self.states, self.executor, self.sampler = states, executor, sampler
        self.check = check
        self._ring = StagingRing(states, max_num_batched_tokens=max_num_batched_tokens, depth=depth)
        self._helper: Helper[Step | None] | None = None

    def prepare(self, plan: StepPlan) -> Step:
        """The tensors of a plan. With a step in flight they need `settle` before they run."""
        buffers = self._ring.acquire()
        return Step(plan, self._batch(plan, buffers), buffers)

    def settle(self, step: Step, plan: StepPlan) -> None:
        """The step before is committed; ``plan`` is what `Scheduler.settle` made of this step's."""
        if plan is step.plan:
            step.batch.resolve()
        else:
            step.plan, step.batch = plan, self._batch(plan, step.buffers)

    def _batch(self, plan: StepPlan, buffers: InputBuffers) -> InputBatch:
        return prepare_inputs(
            self.states,
            (plan.rows, plan.num_scheduled),
            buffers,
            draft_tokens=plan.draft_tokens,
            gather_block_tables=self.executor.reads_gathered_tables,
            check=self.check,
        )

    def run(self, step: Step) -> Sampled:
        """Copy blocks, run the model, sample."""
        if len(step.plan.block_copies[0]):
            self.executor.copy_blocks(*step.plan.block_copies)
        batch = step.batch
        tokens = prompt_tokens(self.states, batch, step.plan.prefilling)
        if not len(tokens):
            return self.sampler.sample(batch, self.executor.execute(batch))
        own = len(batch.logits_indices)
        logits = self.executor.execute(with_more_logits(batch, tokens))
        step.prompt_logprobs = read_prompt_logprobs(self.states, batch, tokens, logits[own:])
        return self.sampler.sample(batch, logits[:own])

    def beside(self, work: Callable[[], Step | None]) -> Helper[Step | None]:
        """Let another thread do this while the caller runs a step."""
        if self._helper is None:
            self._helper = Helper()
        self._helper.start(work)
        return self._helper

    def drop(self, step: Step) -> None:
        """Nobody is left of a step. Blocks that its requests were to start from are known as copied: copy them."""
        if len(step.plan.block_copies[0]):
            self.executor.copy_blocks(*step.plan.block_copies)
        self.release(step)

    def release(self, step: Step) -> None:
        """The step is committed or given up: its buffers are free."""
        self._ring.release(step.buffers)

    def close(self) -> None:
        """End the helper's thread."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None
