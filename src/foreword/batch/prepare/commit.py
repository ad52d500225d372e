"""Apply the samples of a step to the state.

For request b of the batch with c computed and n scheduled tokens, k of them drafts, v known tokens and samples s:

    if its row was freed since the batch was prepared:  nothing (a late result)
    if c + n − k < v:                                   num_computed = c + n     a prompt chunk: s is discarded
                                                        num_accepted = 1
    else:                                               token_ids[row, v : v + len(s)] = s
                                                        num_tokens = v + len(s)
                                                        num_computed = c + n − k + accepted
                                                        num_accepted = max(len(s), 1)

with accepted = max(len(s) − 1, 0): the drafts that verification kept.

With two steps in flight, the second is prepared before the samples of the first are known. `advance` counts the first
as done with all drafts accepted: num_computed = c + n and, for requests that sample, num_placeholders += 1 + k. The
commit then corrects this assumption: num_computed −= k − accepted, num_placeholders −= 1 + k. `resolve` then updates
the second step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import setitem

import numpy as np

from foreword.arrays import I32
from foreword.batch.state.changes import Change
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import CapacityError, PlanError, RequestError
from foreword.integers import as_integer, int32s, length_of


def counts_as_done(states: RequestStates, batch: BatchTensors) -> list[Change]:
    """Return the changes that count a step as done, with all of its drafts accepted and its samples unknown. See
    `advance`.
    """
    buffers = batch.buffers
    if buffers.core is not None:
        return [(buffers.core.advance, batch.num_reqs)]
    rows, k = batch.idx_mapping, batch.num_draft_tokens
    end = batch.num_computed_tokens + batch.num_scheduled_tokens
    current = states.row_generation[rows] == batch.row_generation
    samples = current & (end - k >= states.num_tokens[rows] + states.num_placeholders[rows])
    return [
        (setitem, buffers["samples"], slice(len(samples)), samples),
        *states._progress.advance(rows[current], end[current], samples[current], k[current]),
    ]


def sample_table(states: RequestStates, batch: BatchTensors, sampled: Mapping[str, Sequence[int]] | I32) -> I32:
    """Return the samples as int32 [B] or [B, width], from {req_id: tokens}, or from [B] or [B, width] padded with −1.

    A token is anything with ``__index__``. Raise RequestError for an unknown id or token, PlanError for a shape.
    """
    table = _from_lists(states, batch, sampled) if isinstance(sampled, Mapping) else int32s(sampled, "sampled")
    if not 0 < table.ndim < 3 or len(table) != batch.num_reqs:
        raise PlanError("sampled must be int32 [B] or [B, D + 1], padded with −1", tensor="sampled",
                        expected=(batch.num_reqs, "D + 1"), got=table.shape)  # fmt: skip
    return table


def _from_lists(states: RequestStates, batch: BatchTensors, sampled: Mapping[str, Sequence[int]]) -> I32:
    index = {rid: b for b, rid in enumerate(batch.req_ids)}
    table = np.full((batch.num_reqs, max([1, *map(length_of, sampled.values())])), -1, np.int32)
    for rid, tokens in sampled.items():
        if rid not in index:
            raise RequestError(rid, "sampled", tokens, "is not in this batch", "Commit each batch's own samples.")
        if length_of(tokens) < 0:
            raise RequestError(rid, "sampled", tokens, "expected a list of token ids", "Give an empty list for none.")
        for i, t in enumerate(tokens):
            token = as_integer(t)
            if token is None or not 0 <= token < states.vocab_size:
                limit = f"must be a token id; the vocabulary has {states.vocab_size}"
                raise RequestError(rid, "sampled", t, limit, "Sample again.")
            table[index[rid], i] = token
    return table


def commits(states: RequestStates, batch: BatchTensors, table: I32, advanced: bool) -> list[Change]:
    """Return the changes of a step with these samples.

    Raise PlanError for more samples than drafts + 1, CapacityError for a token past max_model_len.
    """
    rows, k = batch.idx_mapping, batch.num_draft_tokens
    end = batch.num_computed_tokens + batch.num_scheduled_tokens
    table = table[:, None] if table.ndim == 1 else table
    m = _num_samples(states, batch, table)
    v = states.num_tokens[rows]
    current = states.row_generation[rows] == batch.row_generation
    samples = current & (batch.buffers["samples"][: len(rows)] if advanced else end - k >= v)
    m *= samples
    _check_fit(states, batch, m, k, v)
    if not current.all():
        rows, k, end, table, m, samples = (x[current] for x in (rows, k, end, table, m, samples))
    return states._progress.commit(rows, table, m, samples, k, None if advanced else end)


def _num_samples(states: RequestStates, batch: BatchTensors, table: I32) -> I32:
    """Return the number of samples of each request, int32 [B]. Raise PlanError for an entry that is not a token id, or
    that follows padding.
    """
    present = table >= 0
    bad = (table < -1) | (table >= states.vocab_size)
    bad[:, 1:] |= present[:, 1:] > present[:, :-1]
    if bad.any():
        b = int(np.argmax(bad.any(1)))
        raise PlanError("samples must be token ids, padded with −1 at the end only", request=batch.req_ids[b],
                        tensor="sampled", index=b, expected=f"0 … {states.vocab_size - 1}",
                        got=table[b].tolist())  # fmt: skip
    counts: I32 = present.sum(1, dtype=np.int32)
    return counts


def _check_fit(states: RequestStates, batch: BatchTensors, m: I32, k: I32, v: I32) -> None:
    if (bad := m > k + 1).any():
        b = int(np.argmax(bad))
        raise PlanError("more samples than drafts + 1", request=batch.req_ids[b], tensor="sampled", index=b,
                        expected=int(k[b]) + 1, got=int(m[b]))  # fmt: skip
    if (bad := v + m > states.max_model_len).any():
        b = int(np.argmax(bad))
        raise CapacityError(
            f"request {batch.req_ids[b]!r}: {int(v[b])} tokens and {int(m[b])} more do not fit "
            f"max_model_len = {states.max_model_len}; finish it instead of committing past the end",
            request=batch.req_ids[b],
            tensor="sampled",
            index=b,
            expected=states.max_model_len - int(v[b]),
            got=int(m[b]),
        )
