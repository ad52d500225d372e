"""The common step of `vllm.apply` in native code, and the arrays it writes a plan into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.batch.adapters.vllm_requests import sampling_params
from foreword.batch.prepare.backends import native

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates


class VllmFront:
    """Made for the first scheduler output that is applied to some states, and kept by them.

    rows, num_scheduled, num_drafts: int32 [R]; draft_ids: int32 [R · D]: the plan of the last output.
    """

    __slots__ = ("_core", "_views", "draft_ids", "num_drafts", "num_scheduled", "rows", "states")

    def __init__(self, states: RequestStates) -> None:
        reqs = states.max_num_reqs
        self.states = states
        self.rows = np.zeros(reqs, np.int32)
        self.num_scheduled = np.zeros(reqs, np.int32)
        self.num_drafts = np.zeros(reqs, np.int32)
        self.draft_ids = np.zeros(max(reqs * states.max_num_draft_tokens, 1), np.int32)
        self._views: dict[int, tuple[I32, I32]] = {}
        self._core: Any = native.vllm_front(states, self._arrays())

    def _arrays(self) -> dict[str, AnyArray]:
        return {
            "num_placeholders": self.states.num_placeholders,
            "rows": self.rows,
            "num_scheduled": self.num_scheduled,
            "num_drafts": self.num_drafts,
            "draft_ids": self.draft_ids,
        }

    def step(self, cached: Any, num_scheduled: Any, drafts: Any) -> int:
        """Apply the cached requests and read the plan. The number of drafts; −1, and nothing done, if unusual."""
        return -1 if self._core is None else int(self._core.step(cached, num_scheduled, drafts))

    def plan(self, num_reqs: int) -> tuple[I32, I32]:
        """(rows, num_scheduled) of the last output, int32 [B]."""
        views = self._views.get(num_reqs)
        if views is None:
            views = self._views[num_reqs] = (self.rows[:num_reqs], self.num_scheduled[:num_reqs])
        return views

    def admit(self, new: Any) -> bool:
        """Admit plain requests all at once. False, and nothing done, where one of them is not plain."""
        states = self.states
        if self._core is None or states.watchers or states.parked:
            return False
        columns = states.sampling
        done, special = self._core.admit(new, states.content_ids.take(len(new)), columns.version + 1)
        if not done:
            return False
        columns.version += 1
        for i in special:
            columns.set(states.row_of(new[i].req_id), sampling_params(new[i].sampling_params), states.vocab_size)
        return True

    def finish(self, ids: list[str]) -> bool:
        """Free the rows of those ids that are here. False, and nothing done, where somebody has to be told."""
        states = self.states
        if self._core is None or states.watchers or states.loras or states.extras:
            return False
        columns = states.sampling
        rows = self._core.finish(ids, states.content_ids.take(len(ids)), columns.version + 1)
        columns.were_reset(rows)
        return True
