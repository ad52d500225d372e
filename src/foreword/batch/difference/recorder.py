"""Differences taken from one process's states."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32, AnyArray, Bools
from foreword.batch.difference.columns import (
    NO_ROWS,
    geometry_of,
    shared,
)
from foreword.batch.difference.image import Image, extras_of
from foreword.batch.difference.value import StepDifference
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.state.batch_update import BatchUpdate, BatchUpdates
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import is_gathered, num_blocks, row_generation
from foreword.errors import PlanError


class DifferenceRecorder:
    """Follows some states from its construction on. Call `close` at the end.

    The first difference is a snapshot with all live requests. `take` is called for each prepared step, right after
    `prepare_inputs` or, for a step prepared early, after `resolve`: before the states change again.

    It keeps an image of the states: token_ids [R, M], the block tables and the columns. `take` compares all rows'
    columns, O(R), and the tokens of the rows that changed or are scheduled from their computed tokens on.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._updates = BatchUpdates(states)
        self._image = Image(states)
        self._is_first = True

    def close(self) -> None:
        """Stop following the states."""
        self._updates.close()

    def take(self, batch: InputBatch) -> StepDifference:
        """The difference between the last step taken and this one.

        PlanError for a batch of other states, one that was advanced or committed, and one whose states changed since.
        """
        states, image = self._states, self._image
        rows, cancelled = self._plan_of(batch)
        update = self._updates.take()
        added = np.array([a.row for a in update.added], np.int32)
        if self._is_first:
            update = BatchUpdate((), (), ())
            added = np.flatnonzero(states.live).astype(np.int32)
        req_ids = states.req_ids[len(states) - len(added) :]
        admitted = np.fromiter(map(states.row_of, req_ids), np.int32, len(req_ids))
        base = None if self._is_first else image.checksum()
        out: dict[str, AnyArray] = {}
        touched = image.restructure(update, admitted, out)
        image.compare_blocks(touched, out)
        live = rows if cancelled is None else rows[~cancelled]
        image.compare_progress(live, len(live) == len(rows), out)
        params = image.compare_sampling(admitted, out)
        counts, ids = batch.num_draft_tokens, batch.draft_token_ids
        ops = batch.block_ops
        plan: tuple[tuple[str, AnyArray], ...] = (
            ("plan.rows", rows),
            ("plan.counts", shared(batch.num_scheduled_tokens.copy())),
            ("plan.cancelled", NO_ROWS if cancelled is None else cancelled),
            ("drafts.counts", shared(counts.copy()) if len(ids) else NO_ROWS),
            ("drafts.ids", ids.copy()),
            ("ops.zero", ops.zero),
            ("ops.copies", ops.copies.reshape(-1)),
        )
        out |= {name: values for name, values in plan if len(values)}
        tokens, reqs = batch.num_tokens_padded, batch.num_reqs_padded
        difference = StepDifference(
            step=batch.step,
            base=base,
            base_seed=states.sampling.base_seed,
            num_admissions=states.sampling.num_admissions,
            gather=is_gathered(batch),
            pad_to=(tokens if tokens != batch.num_tokens else -1, reqs if reqs != batch.num_reqs else -1),
            geometry=geometry_of(states) if self._is_first else None,
            req_ids=req_ids,
            extras={i: values for i, row in enumerate(admitted.tolist()) if (values := extras_of(states, row))},
            params=params,
            staged=image.compare_mrope(admitted),
            arrays=out,
        )
        self._is_first = False
        return difference

    def _plan_of(self, batch: InputBatch) -> tuple[I32, Bools | None]:
        """The step's rows, and which of its requests are cancelled."""
        states = self._states
        if batch.states is not states:
            raise PlanError("this batch was prepared from other states", step=batch.step)
        batch._check_open()
        rows, generation, computed = batch.idx_mapping.copy(), row_generation(batch), batch.num_computed_tokens
        cancelled = generation < 0
        changed = (states.row_generation[rows] != generation) | (states.num_computed_tokens[rows] != computed)
        if is_gathered(batch):
            for table, held in zip(states.block_tables, num_blocks(batch), strict=True):
                changed |= table.num_blocks[rows] != held
        if (changed & ~cancelled).any():
            b = int(np.argmax(changed & ~cancelled))
            raise PlanError("the states changed since the step was prepared or resolved: take its difference first",
                            step=batch.step, index=b, got=f"row {rows[b]}")  # fmt: skip
        return rows, cancelled if cancelled.any() else None
