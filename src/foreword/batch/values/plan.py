"""A step as the scheduler plans it, and the same plan in arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from foreword.arrays import I32, Bools
from foreword.errors import PlanError
from foreword.integers import int32s, length_of

PlanLike = Mapping[str, int] | tuple[I32, I32]
Drafts = Mapping[str, Sequence[int]] | I32 | None
Order = Literal["given", "decode_first"]
Check = Literal["off", "bounds", "full"]
Backend = Literal["auto", "loops", "numpy", "native", "device"]


class RaggedDrafts(NamedTuple):
    """Drafts of a step. counts: int32 [B], drafts per request. ids: int32 [D], request by request; −1: the id is not
    known yet.
    """

    counts: I32
    ids: I32

    @classmethod
    def of(cls, req_ids: Collection[str], drafts: Mapping[str, Sequence[int]]) -> RaggedDrafts | None:
        """Return the drafts of these requests in this order, None if there are none. Raise PlanError for a value that
        is not a list, or for drafts of another request.
        """
        scheduled = set(req_ids)
        for rid, ids in drafts.items():
            if length_of(ids) < 0:
                raise PlanError("drafts are lists", request=rid, tensor="draft_tokens", expected="token ids", got=ids)
            if rid not in scheduled and len(ids):
                raise PlanError("drafts for a request that is not scheduled", request=rid, tensor="draft_tokens")
        lists = [drafts.get(rid, ()) for rid in req_ids]
        counts = np.fromiter(map(len, lists), np.int32, len(lists))
        if not counts.any():
            return None
        flat = int32s([t for ids in lists for t in ids], "draft_tokens")
        if flat.ndim != 1:
            raise PlanError(
                "drafts are flat lists", tensor="draft_tokens", expected="{req_id: [ids]}", got=dict(drafts)
            )
        return cls(counts, flat)


# A step in arrays, in batch order, as every backend reads it: (rows, num_scheduled, drafts, cancelled).
#
# rows, num_scheduled: int32 [B]; the counts include drafts.
# drafts: None, a table int32 [B, D] padded with −1, or `RaggedDrafts`.
# cancelled: bool [B], requests that were removed after the plan was made and keep their tokens in a step in flight;
# None: none. A cancelled request has num_computed 0, tokens 0, slots −1 and null blocks; its row is not read.
Plan = tuple[I32, I32, I32 | RaggedDrafts | None, Bools | None]


def ragged(plan: Plan) -> RaggedDrafts:
    """Return the plan's drafts as counts [B] and ids [D]; zeros and an empty array without drafts."""
    rows, _, drafts, _ = plan
    if drafts is None:
        return RaggedDrafts(np.zeros(len(rows), np.int32), np.zeros(0, np.int32))
    if isinstance(drafts, RaggedDrafts):
        return drafts
    present = drafts >= 0
    return RaggedDrafts(present.sum(1, dtype=np.int32), drafts[present])


class PlannedStep(Mapping[str, int]):
    """A plan {req_id: tokens to schedule}, drafts included, that is already in arrays."""

    __slots__ = ()
    draft_tokens: Mapping[str, Sequence[int]] | None

    @property
    @abstractmethod
    def arrays(self) -> Plan:
        """Return the plan as a `Plan`."""
