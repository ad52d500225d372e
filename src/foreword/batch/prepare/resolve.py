"""A step prepared before the samples it stands on were known, brought to the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32
from foreword.batch.prepare import plan as _plan
from foreword.batch.prepare.backends import Run, Scalars, native
from foreword.batch.prepare.plan import Drafts, Plan
from foreword.errors import PlanError

if TYPE_CHECKING:
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates


def resolved(
    batch: InputBatch, states: RequestStates, buffers: InputBuffers, run: Run, gathered: bool, drafts: Drafts
) -> Scalars:
    """Prepare the batch's own plan again from the states as they are now, in place. See `InputBatch.resolve`."""
    rows, counts = batch.idx_mapping.copy(), batch.num_scheduled_tokens.copy()
    padded = (batch.num_tokens_padded, batch.num_reqs_padded)
    inert = states.row_generation.take(rows) != batch.row_generation
    waiting = states.num_placeholders.take(rows) > 0
    if run is native.run and not (inert.any() or waiting.any() or len(batch.draft_token_ids)):
        # The usual case: only tokens were missing.
        scalars = native.core_of(states, buffers).prepare_arrays(rows, counts, None, *padded, gathered)
        if scalars is not None:
            return Scalars._make(scalars)
    waiting &= ~inert
    if waiting.any():
        b = int(np.argmax(waiting))
        raise PlanError("the step before is not committed", step=batch.step, request=batch.req_ids[b], index=b)
    num_drafts = batch.num_draft_tokens.copy()
    draft_ids = batch.draft_token_ids.copy() if drafts is None else _fill_in(batch, drafts)
    plan = Plan(
        rows, counts, num_drafts if len(draft_ids) else num_drafts[:0], draft_ids, inert if inert.any() else None
    )
    if run is not native.run:
        _plan.check(states, buffers, plan, padded)
    return run(states, buffers, plan, padded, gathered)


def _fill_in(batch: InputBatch, drafts: Mapping[str, Sequence[int]] | I32) -> I32:
    """The batch's drafts with the ids given: a request that has none given keeps what was planned, fewer leave −1."""
    ids, starts = batch.draft_token_ids.copy(), batch.cu_num_draft_tokens
    given = drafts.items() if isinstance(drafts, Mapping) else zip(batch.req_ids, drafts, strict=True)
    index = {req_id: b for b, req_id in enumerate(batch.req_ids)}
    for req_id, tokens in given:
        if req_id not in index:
            raise PlanError("drafts for a request that is not in this batch", request=req_id, tensor="draft_tokens")
        b = index[req_id]
        planned = ids[starts[b] : starts[b + 1]]
        known = [t for t in tokens if t >= 0]
        if len(known) > len(planned):
            raise PlanError("more drafts than planned", step=batch.step, request=req_id, tensor="draft_tokens",
                            index=b, expected=len(planned), got=len(known))  # fmt: skip
        if known:
            planned[: len(known)] = known
            planned[len(known) :] = -1
    return ids
