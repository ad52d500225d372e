"""What a step changes in the state, once its samples are known.

For request b of the batch with c computed and n scheduled tokens, k of them drafts, v known tokens and samples s:

    if its row was freed since the batch was prepared:  nothing (a late result)
    if c + n − k < v:                                   num_computed = c + n     a prompt chunk: s is discarded
                                                        num_accepted = 1
    else:                                               token_ids[row, v : v + len(s)] = s
                                                        num_tokens = v + len(s)
                                                        num_computed = c + n − k + accepted
                                                        num_accepted = max(len(s), 1)

with accepted = max(len(s) − 1, 0): the drafts that verification kept.

With two steps in flight the second is prepared before the samples of the first are known. `advance` counts the first
as done, all drafts accepted: num_computed = c + n and, where it samples, num_placeholders += 1 + k. The commit then
takes back what was assumed: num_computed −= k − accepted, num_placeholders −= 1 + k. `resolve` updates the second
step's tensors before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreword.arrays import I32, Bools
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.slots import ragged_arange
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.integers import INT32, as_integer, int32s, length_of
from foreword.errors import CapacityError, PlanError, RequestError


def count_as_done(states: RequestStates, batch: BatchTensors) -> None:
    """Count a step as done, all of its drafts accepted and its samples unknown. See `advance`."""
    core = batch.buffers.core
    if core is not None:
        core.advance(batch.num_reqs)
        return
    rows, k = batch.idx_mapping, batch.num_draft_tokens
    end = batch.num_computed_tokens + batch.num_scheduled_tokens
    current = states.row_generation[rows] == batch.row_generation
    samples = current & (end - k >= states.num_tokens[rows] + states.num_placeholders[rows])
    batch.buffers["samples"][: len(samples)] = samples
    states._progress.advance(rows[current], end[current], samples[current], k[current])


def apply_samples(
    states: RequestStates, batch: BatchTensors, sampled: Mapping[str, Sequence[int]] | I32, advanced: bool
) -> None:
    """Apply a step. ``sampled``: {req_id: tokens}, or int32 [B] or [B, D + 1] padded with −1. All or nothing.

    A token of a list is anything with ``__index__``. Raises PlanError for more samples than drafts + 1, RequestError
    for an id not in the batch or a token outside the vocabulary, CapacityError for a token past max_model_len.
    """
    if type(sampled) is np.ndarray and sampled.dtype is INT32 and len(sampled) == batch._scalars[0]:
        table = sampled
    else:
        table = _from_lists(states, batch, sampled) if isinstance(sampled, Mapping) else _as_table(batch, sampled)
    core = batch.buffers.core
    if core is None or not core.commit(table, advanced):
        _apply(states, batch, table, advanced)  # the same in NumPy; it names the rule that a refused table breaks


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


def _as_table(batch: BatchTensors, sampled: I32) -> I32:
    """int32 [B] or [B, width]; PlanError for another shape."""
    table = int32s(sampled, "sampled")
    if table.ndim not in (1, 2) or len(table) != batch.num_reqs:
        raise PlanError("sampled must be int32 [B] or [B, D + 1], padded with −1", tensor="sampled",
                        expected=(batch.num_reqs, "D + 1"), got=table.shape)  # fmt: skip
    return table


def _apply(states: RequestStates, batch: BatchTensors, table: I32, advanced: bool) -> None:
    rows, n, c = batch.idx_mapping, batch.num_scheduled_tokens, batch.num_computed_tokens
    k = batch.num_draft_tokens
    table = _as_table(batch, table)
    table = table[:, None] if table.ndim == 1 else table
    present = table >= 0
    m = present.sum(1, dtype=np.int32)
    _check_padding(states, batch, table, present)
    current = states.row_generation[rows] == batch.row_generation
    v = states.num_tokens[rows]
    samples = current & (batch.buffers["samples"][: len(rows)] if advanced else c + n - k >= v)
    m = np.where(samples, m, 0)
    _check_fit(states, batch, m, k, v)
    progress = states._progress
    progress.reach(rows[current], None if advanced else (c + n)[current])
    rows, m, k, v, table = rows[samples], m[samples], k[samples], v[samples], table[samples]
    local = ragged_arange(m)
    tokens = table[np.repeat(np.arange(len(m)), m), local]
    progress.accept(rows, m, (np.repeat(rows, m), np.repeat(v, m) + local), tokens, k, advanced)


def _check_padding(states: RequestStates, batch: BatchTensors, table: I32, present: Bools) -> None:
    bad = (present[:, 1:] & ~present[:, :-1]).any(1)
    bad |= (table < -1).any(1) | (table >= states.vocab_size).any(1)
    if bad.any():
        b = int(np.argmax(bad))
        raise PlanError("samples must be token ids, padded with −1 at the end only", request=batch.req_ids[b],
                        tensor="sampled", index=b, expected=f"0 … {states.vocab_size - 1}",
                        got=table[b].tolist())  # fmt: skip


def _check_fit(states: RequestStates, batch: BatchTensors, m: I32, k: I32, v: I32) -> None:
    if (bad := m > k + 1).any():
        b = int(np.argmax(bad))
        raise PlanError("more samples than drafts + 1", request=batch.req_ids[b], tensor="sampled", index=b,
                        expected=int(k[b]) + 1, got=int(m[b]))  # fmt: skip
    if (bad := v + m > states.max_model_len).any():
        b = int(np.argmax(bad))
        raise CapacityError(
            f"request {batch.req_ids[b]!r}: {int(v[b])} tokens and {int(m[b])} more do not fit "
            f"max_model_len = {states.max_model_len}; finish it instead of committing past the end"
        )
