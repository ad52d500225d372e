"""A step that computes nothing, for capturing graphs, profiling and idle ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foreword.batch.prepare.backends import Scalars, vectorized
from foreword.batch.prepare.buffers import InputBuffers
from foreword.batch.prepare.inputs import InputBatch
from foreword.batch.prepare.plan import Plan
from foreword.errors import CapacityError, PlanError

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates


def make_dummy(
    states: RequestStates, buffers: InputBuffers, *, num_tokens: int, num_reqs: int, gather_block_tables: bool = True
) -> InputBatch:
    """A batch of ``num_reqs`` requests with ``num_tokens`` tokens in the buffers a real step would use.

    Request b has num_tokens // num_reqs tokens, the last num_tokens mod num_reqs requests one more, so none has more
    than ceil(num_tokens / num_reqs). Token 0, positions from 0, slots −1, null blocks: it reads no request's row and
    writes nowhere, whatever the states hold. It cannot be committed.
    """
    if not 1 <= num_reqs <= num_tokens:
        raise PlanError("a dummy has at least one token a request", expected=f"1 … {num_tokens}", got=num_reqs)
    if num_reqs > states.max_num_reqs or num_tokens > buffers.max_num_batched_tokens:
        raise CapacityError(
            f"{num_reqs} requests, {num_tokens} tokens: the buffers hold {states.max_num_reqs} and "
            f"{buffers.max_num_batched_tokens}"
        )
    each, more = divmod(num_tokens, num_reqs)
    counts = np.full(num_reqs, each, np.int32)
    counts[num_reqs - more :] += 1
    if counts[-1] > states.max_model_len:
        raise PlanError("a request longer than max_model_len", expected=states.max_model_len, got=int(counts[-1]))
    none = np.zeros(0, np.int32)
    plan = Plan(np.arange(num_reqs, dtype=np.int32), counts, none, none, np.ones(num_reqs, np.bool_))
    scalars: Scalars = vectorized.run(states, buffers, plan, (None, None), gather_block_tables)
    batch = InputBatch(
        states, buffers, scalars, [f"dummy {b}" for b in range(num_reqs)], gather_block_tables, vectorized.run
    )
    batch.claim_commit(states)
    return batch
