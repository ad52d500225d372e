"""What a step changes in the state, once its samples are known.

For request b of the batch with c computed and n scheduled tokens, k of them drafts, v known tokens and samples s:

    if its row was freed since the batch was prepared:  nothing (a late result)
    if c + n − k < v:                                   num_computed = c + n     a prompt chunk: s is discarded
    else:                                               token_ids[row, v : v + len(s)] = s
                                                        num_tokens = v + len(s)
                                                        num_computed = c + n − k + accepted

with accepted = max(len(s) − 1, 0): the drafts that verification kept.

With two steps in flight the second is prepared before the samples of the first are known. `advance` counts the first
as done, all drafts accepted: num_computed = c + n and, where it samples, num_placeholders += 1 + k. The commit then
takes back what was assumed: num_computed −= k − accepted, num_placeholders −= 1 + k. `InputBatch.resolve` brings the
second step's tensors to the truth before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import I32, Bools
from foreword.batch.prepare.backends.vectorized import ragged_arange
from foreword.batch.prepare.plan import int32s
from foreword.errors import CapacityError, PlanError, RequestError

if TYPE_CHECKING:
    from foreword.batch.prepare.inputs import InputBatch
    from foreword.batch.state.request_states import RequestStates


def advance(states: RequestStates, batch: InputBatch) -> None:
    """Count a step as done, all of its drafts accepted and its samples unknown. Once, before its commit.

    Raises PlanError for a batch advanced or committed before, of other states, or not resolved.
    """
    batch.claim_advance(states)
    if batch.advance_native():
        return
    rows, k = batch.idx_mapping, batch.num_draft_tokens
    end = batch.num_computed_tokens + batch.num_scheduled_tokens
    current = states.row_generation[rows] == batch.row_generation
    samples = current & (end - k >= states.num_tokens[rows] + states.num_placeholders[rows])
    batch.set_samples(samples)
    states.num_computed_tokens[rows[current]] = end[current]
    states.num_placeholders[rows[samples]] += 1 + k[samples]


def commit(states: RequestStates, batch: InputBatch, sampled: Mapping[str, Sequence[int]] | I32) -> None:
    """Apply a step. ``sampled``: {req_id: tokens}, or int32 [B] or [B, D + 1] padded with −1. All or nothing.

    Raises PlanError for a batch committed before, prepared from other states or before rows moved, not resolved, or
    for more samples than drafts + 1; RequestError for an id not in the batch or a token outside the vocabulary;
    CapacityError for a token past max_model_len.
    """
    batch.claim_commit(states)
    try:
        if type(sampled) is np.ndarray and batch.commit_native(sampled):
            return
        table = _from_lists(states, batch, sampled) if isinstance(sampled, Mapping) else _as_table(batch, sampled)
        if not batch.commit_native(table):
            _apply(states, batch, table)  # the same in NumPy, and what says which rule a refused table breaks
    except Exception:
        batch.release_commit()
        raise


def _from_lists(states: RequestStates, batch: InputBatch, sampled: Mapping[str, Sequence[int]]) -> I32:
    index = {rid: b for b, rid in enumerate(batch.req_ids)}
    for rid, tokens in sampled.items():
        if rid not in index:
            raise RequestError(rid, "sampled", tokens, "is not in this batch", "Commit each batch's own samples.")
        if not hasattr(tokens, "__len__"):
            raise RequestError(rid, "sampled", tokens, "is no list of token ids", "Give a list, empty for none.")
        for t in tokens:
            if not isinstance(t, int | np.integer) or not 0 <= t < states.vocab_size:
                raise RequestError(
                    rid, "sampled", t, f"is no token id, the vocabulary has {states.vocab_size}", "Sample again."
                )
    width = max(map(len, sampled.values()), default=0)
    table = np.full((batch.num_reqs, max(width, 1)), -1, np.int32)
    for rid, tokens in sampled.items():
        table[index[rid], : len(tokens)] = tokens
    return table


def _as_table(batch: InputBatch, sampled: I32) -> I32:
    table = int32s(sampled, "sampled")
    if table.ndim not in (1, 2) or len(table) != batch.num_reqs:
        raise PlanError("sampled must be int32 [B] or [B, D + 1], padded with −1", tensor="sampled",
                        expected=(batch.num_reqs, "D + 1"), got=table.shape)  # fmt: skip
    return table[:, None] if table.ndim == 1 else table


def _apply(states: RequestStates, batch: InputBatch, table: I32) -> None:
    rows, n, c = batch.idx_mapping, batch.num_scheduled_tokens, batch.num_computed_tokens
    k = batch.num_draft_tokens
    present = table >= 0
    m = present.sum(1, dtype=np.int32)
    _check_padding(states, batch, table, present)
    current = states.row_generation[rows] == batch.row_generation
    v = states.num_tokens[rows]
    samples = current & (batch.samples if batch.advanced else c + n - k >= v)
    m = np.where(samples, m, 0)
    _check_fit(states, batch, m, k, v)

    if not batch.advanced:
        states.num_computed_tokens[rows[current]] = (c + n)[current]
    rejected = k - np.maximum(m - 1, 0)
    states.num_computed_tokens[rows[samples]] -= rejected[samples]
    if batch.advanced:
        states.num_placeholders[rows[samples]] -= 1 + k[samples]
    states.num_tokens[rows[current]] = (v + m)[current]
    local = ragged_arange(m)
    tokens = table[np.repeat(np.arange(len(m)), m), local]
    states.token_ids[np.repeat(rows, m), np.repeat(v, m) + local] = tokens
    some = m > 0
    states.last_sampled_token[rows[some]] = tokens[np.cumsum(m)[some] - 1]


def _check_padding(states: RequestStates, batch: InputBatch, table: I32, present: Bools) -> None:
    bad = (present[:, 1:] & ~present[:, :-1]).any(1)
    bad |= (table < -1).any(1) | (table >= states.vocab_size).any(1)
    if bad.any():
        b = int(np.argmax(bad))
        raise PlanError("samples must be token ids, padded with −1 at the end only", request=batch.req_ids[b],
                        tensor="sampled", index=b, expected=f"0 … {states.vocab_size - 1}",
                        got=table[b].tolist())  # fmt: skip


def _check_fit(states: RequestStates, batch: InputBatch, m: I32, k: I32, v: I32) -> None:
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
