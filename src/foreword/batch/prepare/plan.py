"""Convert a scheduler's plan to arrays, and check it with the state. Both are O(B)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreword.arrays import I32, I64, Bools, Ints
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.values.plan import Drafts, Order, Plan, PlanLike, PlannedStep, RaggedDrafts, ragged
from foreword.errors import CapacityError, PlanError
from foreword.integers import INT32_MAX, as_int32, as_integer, int32s, is_int32

Padding = tuple[int, int]  # (tokens, requests), −1 for none
NO_PADDING: Padding = (-1, -1)


def normalize(states: RequestStates, plan: PlanLike, drafts: Drafts, order: Order) -> Plan:
    """Return any form of plan and drafts as a `Plan` in the given order. Raise RequestError for an unknown id,
    PlanError for a value that is not a plan. Arrays are not changed; `check` tests their types.
    """
    if type(plan) is tuple and len(plan) == 2:
        rows, num_scheduled = plan
        wanted: Plan
        if drafts is None or type(drafts) is np.ndarray:
            wanted = rows, num_scheduled, drafts, None
        elif isinstance(drafts, Mapping):
            wanted = rows, num_scheduled, RaggedDrafts.of(states._directory.ids_of(rows), drafts), None
        else:
            wanted = rows, num_scheduled, int32s(drafts, "draft_tokens"), None
    elif isinstance(plan, PlannedStep) and (drafts is None or drafts is plan.draft_tokens):
        wanted = plan.arrays
    elif isinstance(plan, Mapping):
        rows, counts = np.fromiter(map(states.row_of, plan), np.int32, len(plan)), _counts(plan)
        if drafts is not None and not isinstance(drafts, Mapping):
            raise PlanError("with a plan by request id, draft_tokens is a mapping too", tensor="draft_tokens",
                            expected="{req_id: [ids]}", got=type(drafts).__name__)  # fmt: skip
        wanted = rows, counts, None if drafts is None else RaggedDrafts.of(plan, drafts), None
    else:
        raise PlanError("a plan is {req_id: tokens} or (rows, num_scheduled)", tensor="plan", got=type(plan).__name__)
    if order == "given":
        return wanted
    if order != "decode_first":
        raise PlanError(f"order={order!r}: must be 'given' or 'decode_first'")
    return decode_first(_as_int32(wanted), states.max_num_draft_tokens)


def _as_int32(plan: Plan) -> Plan:
    """Return the plan with arrays of int32. Raise PlanError for a value that is not an array of integers or has the
    wrong shape.
    """
    rows, num_scheduled, drafts, cancelled = plan
    rows, num_scheduled = int32s(rows, "rows"), int32s(num_scheduled, "num_scheduled")
    if rows.ndim != 1 or rows.shape != num_scheduled.shape:
        raise PlanError("rows and num_scheduled must be one-dimensional and equally long",
                        expected=rows.shape, got=num_scheduled.shape)  # fmt: skip
    if drafts is None or isinstance(drafts, RaggedDrafts):
        return rows, num_scheduled, drafts, cancelled
    table = int32s(drafts, "draft_tokens")
    if table.ndim != 2 or len(table) != len(rows):
        raise PlanError("draft_tokens must be [B, D], padded with −1", tensor="draft_tokens",
                        expected=(len(rows), "D"), got=table.shape)  # fmt: skip
    if (bad := (table[:, 1:] >= 0) & (table[:, :-1] < 0)).any():
        b = int(np.argmax(bad.any(1)))
        raise PlanError("draft_tokens has a −1 before a draft", tensor="draft_tokens", index=b,
                        expected="−1 only as padding at the end", got=table[b].tolist())  # fmt: skip
    return rows, num_scheduled, table, cancelled


def _counts(plan: Mapping[str, int]) -> I32:
    """Return the plan's numbers as int32 [B]. Raise PlanError for the first one that is not an integer."""
    counts = as_int32(list(plan.values()))
    if counts is None or counts.ndim != 1:
        rid, got = next((rid, n) for rid, n in plan.items() if (count := as_int32(n)) is None or count.ndim)
        raise PlanError("expected a number of tokens", request=rid, tensor="num_scheduled_tokens",
                        expected="an integer", got=got)  # fmt: skip
    return counts


def padding(pad_to: tuple[int | None, int | None] | None) -> Padding:
    """Return pad_to with −1 for None. Raise PlanError unless it is a pair whose parts are None or at least 0."""
    if type(pad_to) is tuple and len(pad_to) == 2:  # as executors give it
        tokens, reqs = pad_to
        if type(tokens) is int and type(reqs) is int and 0 <= tokens <= INT32_MAX and 0 <= reqs <= INT32_MAX:
            return pad_to  # type: ignore[return-value]
    if pad_to is None:
        return NO_PADDING
    if not isinstance(pad_to, tuple | list) or len(pad_to) != 2:
        raise PlanError("pad_to is a pair", tensor="pad_to", expected="(num_tokens, num_reqs)", got=pad_to)
    tokens, reqs = pad_to
    for what, pad in zip(("tokens", "requests"), pad_to, strict=True):
        if pad is not None and not is_int32(as_integer(pad), 0):
            raise PlanError("expected a number to pad to", tensor=f"pad_to ({what})", expected="None or 0 or more",
                            got=pad)  # fmt: skip
    return -1 if tokens is None else int(tokens), -1 if reqs is None else int(reqs)


def decode_first(plan: Plan, max_num_draft_tokens: int) -> Plan:
    """Return the plan sorted by (no drafts, tokens != 1 + max_num_draft_tokens, tokens), stable: verification and
    decode requests first, then short extends, then long prefills. If it is already sorted, return the plan itself.
    """
    rows, num_scheduled, drafts, cancelled = plan
    key = num_scheduled.astype(np.int64)
    key += (num_scheduled != 1 + max_num_draft_tokens) * (np.int64(1) << 32)
    if drafts is not None:
        has_drafts = drafts.counts > 0 if isinstance(drafts, RaggedDrafts) else (drafts >= 0).any(1)
        key += ~has_drafts * (np.int64(1) << 33)
    if (key[1:] >= key[:-1]).all():
        return plan
    order = np.argsort(key, kind="stable")
    if isinstance(drafts, RaggedDrafts):
        starts, counts = (np.cumsum(drafts.counts) - drafts.counts)[order], drafts.counts[order]
        shift = starts - (np.cumsum(counts) - counts)  # distance from a draft's new place to its old one
        drafts = RaggedDrafts(counts, drafts.ids[np.arange(len(drafts.ids)) + np.repeat(shift, counts)])
    elif drafts is not None:
        drafts = drafts[order]
    return rows[order], num_scheduled[order], drafts, cancelled if cancelled is None else cancelled[order]


def check(states: RequestStates, buffers: InputBuffers, plan: Plan, pad: Padding) -> Plan:
    """Return the plan in int32 arrays. Raise an error for the first wrong read or write. It costs O(B + drafts + blocks
    written).

    With c computed, n scheduled, k drafts, v tokens known or in flight and P tokens per block, each row must satisfy
        live, planned once;  n ≥ 1 + k;  0 ≤ k ≤ max_num_draft_tokens;
        c + n ≤ v if k = 0, c + n − k = v otherwise;  c + n ≤ M;  num_blocks ≥ ceil((c + n) / P) in every group;
        the entries c // P … (c + n − 1) // P of its block-table row are not null in any group.
    """
    plan = _as_int32(plan)
    rows, num_scheduled, _, cancelled = plan
    n = num_scheduled.astype(np.int64)
    B, T = len(rows), int(n.sum())
    _capacity("requests", B, states.max_num_reqs, "max_num_reqs")
    for what, size, got, cap in (
        ("tokens", pad[0], T, buffers.max_num_batched_tokens),
        ("requests", pad[1], B, states.max_num_reqs),
    ):
        if size >= 0 and not got <= size <= cap:
            raise PlanError(f"pad_to {what} out of range", step=states._step + 1, tensor=f"pad_to ({what})",
                            expected=f"{got} … {cap}", got=size)  # fmt: skip
    counts, ids = ragged(plan)
    k = counts.astype(np.int64)
    if cancelled is not None:  # a cancelled request has tokens in the step, but reads and writes nothing else
        live = ~cancelled
        ids = ids[np.repeat(live, k)]
        rows, n, k, B = rows[live], n[live], k[live], int(live.sum())
    if not B:
        return plan

    def require(ok: Bools, message: str, tensor: str, expected: object, got: Ints) -> None:
        if ok.all():
            return
        b = int(np.argmin(ok))
        want = expected[b].item() if isinstance(expected, np.ndarray) else expected
        rid = states._find_req_id(int(rows[b]))
        raise PlanError(
            message, step=states._step + 1, request=rid, tensor=tensor, index=b, expected=want, got=got[b].item()
        )

    counted, exists = "num_scheduled_tokens", (rows >= 0) & (rows < states.max_num_reqs)
    require(exists, "a row that does not exist", "rows", f"0 … {states.max_num_reqs - 1}", rows)
    require(states.live[rows], "a row that holds no request", "rows", "a live row", rows)
    first = np.zeros(B, np.bool_)
    first[np.unique(rows, return_index=True)[1]] = True
    require(first, "a request is scheduled twice", "rows", "each row once", rows)
    require(n >= 1, "a scheduled request needs at least one token", counted, "1 or more", n)
    most = states.max_num_draft_tokens
    require(k <= most, "more drafts than max_num_draft_tokens", "draft_tokens", most, k)
    require(n > k, "drafts need a known token before them", counted, k + 1, n)
    c, known = states.num_computed_tokens[rows].astype(np.int64), states.num_tokens[rows].astype(np.int64)
    known += states.num_placeholders[rows]
    end, left = c + n, known - c
    require((k == 0) | (n - k == left), "drafts must follow the last known token", counted, left + k, n)
    require(n - k <= left, "scheduled past the known tokens", counted, left, n)
    require(end <= states.max_model_len, "scheduled past max_model_len", counted, states.max_model_len - c, n)
    for g, table in enumerate(states.block_tables):
        need, held, name = -(-end // table.tokens_per_block), table.num_blocks[rows], f"block_table[{g}]"
        require(need <= held, "too few blocks for the tokens scheduled", name, need, held)
        if table.may_hold_null:
            null = _writes_null(table.table, table.null_block, rows, c // table.tokens_per_block, need)
            message, expected = (
                "scheduled tokens would be written to the null block",
                "a block other than the null block",
            )
            require(~null, message, name, expected, np.full(B, table.null_block))
    if ids.size and (ids.min() < -1 or ids.max() >= states.vocab_size):
        i = int(np.argmax((ids < -1) | (ids >= states.vocab_size)))
        b = int(np.searchsorted(np.cumsum(k), i, side="right"))
        raise PlanError("a draft is not a token id", step=states._step + 1, request=states._find_req_id(int(rows[b])),
                        tensor="draft_tokens", index=i, expected=f"−1 … {states.vocab_size - 1}",
                        got=int(ids[i]))  # fmt: skip
    _capacity("tokens", T, buffers.max_num_batched_tokens, "max_num_batched_tokens")
    return plan


def _writes_null(table: I32, null_block: int, rows: I32, first: I64, stop: I64) -> Bools:
    """Return bool [B]: whether any of the entries first[b] … stop[b] − 1 of the rows is null."""
    span = int((stop - first).max())
    at = np.minimum(first[:, None] + np.arange(span), stop[:, None] - 1)
    null: Bools = (table[rows[:, None], at] == null_block).any(1)
    return null


def _capacity(what: str, got: int, cap: int, name: str) -> None:
    if got > cap:
        raise CapacityError(
            f"{got} {what} in one step, {name} is {cap}: schedule fewer, or build with a larger {name}",
            tensor=name,
            expected=cap,
            got=got,
        )
