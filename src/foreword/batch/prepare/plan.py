"""The scheduler's choice, brought into arrays and checked against the state. Both are O(B)."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from foreword.arrays import I32, I64, Bools, Ints
from foreword.batch.values.integers import as_int32, is_int32
from foreword.errors import CapacityError, PlanError

if TYPE_CHECKING:
    from foreword.batch.prepare.buffers import InputBuffers
    from foreword.batch.state.request_states import RequestStates

PlanLike = Mapping[str, int] | tuple[I32, I32]
Drafts = Mapping[str, Sequence[int]] | I32 | None
Order = Literal["given", "decode_first"]

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A step in arrays, batch order. rows, num_scheduled: int32 [B]. num_drafts: int32 [B], or empty for no drafts
    at all; draft_ids: int32 [total drafts], request by request, −1 for a draft whose id is not known here.
    inert: bool [B], requests that were removed after the plan was made and keep their place in a step in flight;
    None: none. An inert request has num_computed 0, token 0, slots −1 and null blocks, and its row is not read.
    """

    rows: I32
    num_scheduled: I32
    num_drafts: I32
    draft_ids: I32
    inert: Bools | None = None


class PlannedStep(Mapping[str, int]):
    """{req_id: tokens} that somebody has brought into arrays already, drafts included."""

    __slots__ = ()
    draft_tokens: Mapping[str, Sequence[int]] | None

    plan: tuple[I32, I32]  # rows, num_scheduled

    @property
    @abstractmethod
    def drafts(self) -> tuple[I32, I32]:
        """(num_drafts [B] or empty, draft_ids), as in `Plan`."""


def normalize(states: RequestStates, plan: PlanLike, drafts: Drafts) -> Plan:
    """Either form of plan and drafts as arrays. RequestError for an id that is not here."""
    if isinstance(plan, tuple):
        if len(plan) != 2:
            raise PlanError("a plan in arrays is a pair", tensor="plan", expected="(rows, num_scheduled)", got=plan)
        rows, counts = int32s(plan[0], "rows"), int32s(plan[1], "num_scheduled")
        if rows.shape != counts.shape or rows.ndim != 1:
            raise PlanError("rows and num_scheduled must be one-dimensional and equally long",
                            expected=rows.shape, got=counts.shape)  # fmt: skip
        if drafts is None:
            return Plan(rows, counts, _NONE, _NONE)
        if isinstance(drafts, Mapping):
            return _with_draft_lists(rows, counts, states.req_ids_of(rows), drafts)
        table = int32s(drafts, "draft_tokens")
        if table.ndim != 2 or len(table) != len(rows):
            raise PlanError("draft_tokens must be [B, D], padded with −1", tensor="draft_tokens",
                            expected=(len(rows), "D"), got=table.shape)  # fmt: skip
        present = table >= 0
        num = present.sum(1, dtype=np.int32)
        if bool((present[:, 1:] > present[:, :-1]).any()):
            b = int(np.argmax((present[:, 1:] > present[:, :-1]).any(1)))
            raise PlanError("draft_tokens has a −1 before a draft", tensor="draft_tokens", index=b,
                            expected="−1 only as padding at the end", got=table[b].tolist())  # fmt: skip
        return Plan(rows, counts, num, table[present]) if num.any() else Plan(rows, counts, _NONE, _NONE)
    if isinstance(plan, PlannedStep) and (drafts is None or drafts is plan.draft_tokens):
        return Plan(*plan.plan, *plan.drafts)
    if not isinstance(plan, Mapping):
        raise PlanError("a plan is {req_id: tokens} or (rows, num_scheduled)", tensor="plan", got=type(plan).__name__)
    rows = np.fromiter(map(states.row_of, plan), np.int32, len(plan))
    counts = _counts(plan)
    if drafts is None:
        return Plan(rows, counts, _NONE, _NONE)
    if not isinstance(drafts, Mapping):
        raise PlanError("with a plan by request id, draft_tokens is a mapping too", tensor="draft_tokens",
                        expected="{req_id: [ids]}", got=type(drafts).__name__)  # fmt: skip
    return _with_draft_lists(rows, counts, plan, drafts)


def _counts(plan: Mapping[str, int]) -> I32:
    """int32 [B] the plan's numbers; PlanError for the first that is none."""
    counts = as_int32(list(plan.values()))
    if counts is None or counts.ndim != 1:
        rid, got = next((rid, n) for rid, n in plan.items() if not is_int32(n))
        raise PlanError("no number of tokens", request=rid, tensor="num_scheduled_tokens", expected="an integer",
                        got=got)  # fmt: skip
    return counts


def int32s(values: npt.ArrayLike, tensor: str) -> I32:
    """Integers as contiguous int32; PlanError for what is none, or does not fit."""
    array = as_int32(values)
    if array is None:
        got = getattr(values, "dtype", None) or reprlib.repr(values)
        raise PlanError("must be integers that fit int32", tensor=tensor, expected="int32", got=str(got))
    return np.ascontiguousarray(array)


def _with_draft_lists(rows: I32, counts: I32, req_ids: Collection[str], drafts: Mapping[str, Sequence[int]]) -> Plan:
    """The plan with its requests' drafts; PlanError for drafts that are no list, or of a request not scheduled."""
    scheduled = set(req_ids)
    for rid, ids in drafts.items():
        if not hasattr(ids, "__len__"):
            raise PlanError("drafts are lists", request=rid, tensor="draft_tokens", expected="token ids", got=ids)
        if rid not in scheduled and len(ids):
            raise PlanError("drafts for a request that is not scheduled", request=rid, tensor="draft_tokens")
    lists = [drafts.get(rid, ()) for rid in req_ids]
    num = np.fromiter(map(len, lists), np.int32, len(lists))
    if not num.any():
        return Plan(rows, counts, _NONE, _NONE)
    return Plan(rows, counts, num, int32s([t for ids in lists for t in ids], "draft_tokens"))


def check_padding(pad_to: tuple[int | None, int | None]) -> None:
    """PlanError unless it is a pair, each of them None or a number that is not negative."""
    if not isinstance(pad_to, tuple | list) or len(pad_to) != 2:
        raise PlanError("pad_to is a pair", tensor="pad_to", expected="(num_tokens, num_reqs)", got=pad_to)
    for what, pad in zip(("tokens", "requests"), pad_to, strict=True):
        if pad is not None and (not isinstance(pad, int | np.integer) or pad < 0):
            raise PlanError("no number to pad to", tensor=f"pad_to ({what})", expected="None or 0 or more", got=pad)


def is_decode_first(num_scheduled: I32, drafts: Drafts, max_num_draft_tokens: int) -> bool:
    """Whether a plan in arrays, its drafts [B, D] or None, is in `decode_first` order: keeping the order costs a look.
    False for any other form, whatever its order.
    """
    num_drafts = _NONE
    if not isinstance(num_scheduled, np.ndarray) or num_scheduled.ndim != 1:
        return False
    if drafts is not None:
        if not isinstance(drafts, np.ndarray) or drafts.ndim != 2 or len(drafts) != len(num_scheduled):
            return False
        num_drafts = (drafts >= 0).sum(1, dtype=np.int32)
    return _ascends(_decode_first_key(num_scheduled, num_drafts, max_num_draft_tokens))


def decode_first(plan: Plan, max_num_draft_tokens: int) -> Plan:
    """The plan in the order (no drafts, tokens != 1 + max_num_draft_tokens, tokens), stable: verification and decode
    rows first, then short extends, then long prefills. The plan itself where it is in this order already.
    """
    key = _decode_first_key(plan.num_scheduled, plan.num_drafts, max_num_draft_tokens)
    if _ascends(key):
        return plan
    order = np.argsort(key, kind="stable")
    rows, counts, num = plan.rows[order], plan.num_scheduled[order], plan.num_drafts
    if not num.size:
        return Plan(rows, counts, _NONE, _NONE)
    starts, num = (np.cumsum(num) - num)[order], num[order]
    shift = starts - (np.cumsum(num) - num)  # from where a request's drafts were to where they go
    return Plan(rows, counts, num, plan.draft_ids[np.arange(len(plan.draft_ids)) + np.repeat(shift, num)])


def _decode_first_key(num_scheduled: I32, num_drafts: I32, max_num_draft_tokens: int) -> I64:
    """int64 [B]: (no drafts, tokens != 1 + max_num_draft_tokens, tokens) as one number."""
    key = num_scheduled.astype(np.int64)
    key += (num_scheduled != 1 + max_num_draft_tokens) * (np.int64(1) << 32)
    if num_drafts.size:
        key += (num_drafts == 0) * (np.int64(1) << 33)
    return key


def _ascends(key: I64) -> bool:
    return bool((key[1:] >= key[:-1]).all())


def check(
    states: RequestStates, buffers: InputBuffers, plan: Plan, pad_to: tuple[int | None, int | None] | None
) -> None:
    """Raise for the first thing that would read or write where it must not. O(B + drafts); changes nothing.

    With c computed, n scheduled, k drafts, v tokens known or in flight and P tokens a block, each row must satisfy
        live, planned once;  n ≥ 1 + k;  0 ≤ k ≤ max_num_draft_tokens;
        c + n ≤ v if k = 0, c + n − k = v otherwise;  c + n ≤ M;  num_blocks ≥ ceil((c + n) / P) in every group.
    """
    rows, n = plan.rows, plan.num_scheduled.astype(np.int64)
    B, T = len(rows), int(n.sum())
    _capacity("requests", B, states.max_num_reqs, "max_num_reqs")
    if pad_to is not None:
        for what, pad, got, cap in (
            ("tokens", pad_to[0], T, buffers.max_num_batched_tokens),
            ("requests", pad_to[1], B, states.max_num_reqs),
        ):
            if pad is not None and not got <= pad <= cap:
                raise PlanError(f"pad_to {what} out of range", step=states.step, tensor=f"pad_to ({what})",
                                expected=f"{got} … {cap}", got=pad)  # fmt: skip
    if plan.inert is not None:  # takes its tokens' places and touches nothing else
        live = ~plan.inert
        k_all = plan.num_drafts if plan.num_drafts.size else np.zeros(B, np.int32)
        plan = Plan(rows[live], plan.num_scheduled[live], k_all[live], plan.draft_ids[np.repeat(live, k_all)])
        rows, n, B = plan.rows, n[live], int(live.sum())
    if not B:
        return

    def fail(bad: Bools, message: str, tensor: str, expected: object, got: Ints,
             ) -> NoReturn:  # fmt: skip
        b = int(np.argmax(bad))
        row = int(rows[b])
        rid = states._req_ids[row] if 0 <= row < states.max_num_reqs else None
        want = expected[b].item() if isinstance(expected, np.ndarray) else expected
        raise PlanError(
            message, step=states.step, request=rid, tensor=tensor, index=b, expected=want, got=got[b].item()
        )

    if (bad := (rows < 0) | (rows >= states.max_num_reqs)).any():
        fail(bad, "a row that does not exist", "rows", f"0 … {states.max_num_reqs - 1}", rows)
    if (bad := ~states.live[rows]).any():
        fail(bad, "a row that holds no request", "rows", "a live row", rows)
    first = np.unique(rows, return_index=True)[1]
    if len(first) != B:
        bad = np.ones(B, np.bool_)
        bad[first] = False
        fail(bad, "a request is scheduled twice", "rows", "each row once", rows)
    if (bad := n < 1).any():
        fail(bad, "a scheduled request needs at least one token", "num_scheduled_tokens", "1 or more", n)
    k = plan.num_drafts.astype(np.int64) if plan.num_drafts.size else np.zeros(B, np.int64)
    if (bad := k > states.max_num_draft_tokens).any():
        fail(bad, "more drafts than max_num_draft_tokens", "draft_tokens", states.max_num_draft_tokens, k)
    if (bad := n < 1 + k).any():
        fail(bad, "drafts need a known token before them", "num_scheduled_tokens", k + 1, n)
    c, v = states.num_computed_tokens[rows].astype(np.int64), states.num_tokens[rows].astype(np.int64)
    v += states.num_placeholders[rows]
    if (bad := (k > 0) & (c + n - k != v)).any():
        fail(bad, "drafts must follow the last known token", "num_scheduled_tokens", v - c + k, n)
    if (bad := c + n - k > v).any():
        fail(bad, "scheduled past the known tokens", "num_scheduled_tokens", v - c, n)
    if (bad := c + n > states.max_model_len).any():
        fail(bad, "scheduled past max_model_len", "num_scheduled_tokens", states.max_model_len - c, n)
    for g, table in enumerate(states.block_tables):
        need, held = -(-(c + n) // table.tokens_per_block), table.num_blocks[rows]
        if (bad := need > held).any():
            fail(bad, "too few blocks for the tokens scheduled", f"block_table[{g}]", need, held)
    ids = plan.draft_ids
    if ids.size and (ids.min() < -1 or ids.max() >= states.vocab_size):
        i = int(np.argmax((ids < -1) | (ids >= states.vocab_size)))
        b = int(np.searchsorted(np.cumsum(k), i, side="right"))
        raise PlanError("a draft is no token id", step=states.step, request=states._req_ids[int(rows[b])],
                        tensor="draft_tokens", index=i, expected=f"−1 … {states.vocab_size - 1}",
                        got=int(ids[i]))  # fmt: skip
    _capacity("tokens", T, buffers.max_num_batched_tokens, "max_num_batched_tokens")


def _capacity(what: str, got: int, cap: int, name: str) -> None:
    if got > cap:
        raise CapacityError(f"{got} {what} in one step, {name} is {cap}: schedule fewer, or build with a larger {name}")
