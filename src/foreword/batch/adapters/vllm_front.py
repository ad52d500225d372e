"""The common case of `vllm.apply` in native code, and the arrays that it writes a plan into."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.batch.adapters.vllm_requests import sampling_params
from foreword.batch.state.changes import make
from foreword.batch.state.request_states import RequestStates
from foreword.native import native


def native_core(states: RequestStates, plan: dict[str, AnyArray]) -> Any:
    """Return the native core that reads vLLM-shaped scheduler output into ``plan``; None if the native module is not
    built.
    """
    core, s = states._core, states
    return None if core is None else native.VllmFastPath(core, plan, s.observers, s.loras.adapter_of, s.extras.rows)


class FastPath:
    """The plan of the last scheduler output: rows, num_scheduled, num_drafts int32 [R]; draft_ids int32 [R · D]."""

    __slots__ = ("_core", "_views", "draft_ids", "num_drafts", "num_scheduled", "rows", "states")

    def __init__(self, states: RequestStates) -> None:
        reqs = states.max_num_reqs
        self.states = states
        self.rows = np.zeros(reqs, np.int32)
        self.num_scheduled = np.zeros(reqs, np.int32)
        self.num_drafts = np.zeros(reqs, np.int32)
        self.draft_ids = np.zeros(max(reqs * states.max_num_draft_tokens, 1), np.int32)
        self._views: dict[int, tuple[I32, I32]] = {}
        arrays = {name: getattr(self, name) for name in ("rows", "num_scheduled", "num_drafts", "draft_ids")}
        self._core = native_core(states, arrays)

    def apply(self, output: Any) -> int:
        """Apply a whole scheduler output: `finish`, `admit` and `step`. Return the number of drafts; or −1 − the number
        of these three parts that were done, in which case the caller has to do the others, and `write_special` after
        two parts.
        """
        return -1 if self._core is None else int(self._core.apply(output))

    def step(self, cached: Any, num_scheduled: Any, drafts: Any) -> int:
        """Apply cached requests, read the plan and return the number of drafts; −1, with nothing changed, for a case
        that only the Python code handles.
        """
        return -1 if self._core is None else int(self._core.step(cached, num_scheduled, drafts))

    def plan(self, num_reqs: int) -> tuple[I32, I32]:
        """Return (rows, num_scheduled) of the last output, int32 [B]."""
        views = self._views.get(num_reqs)
        if views is None:
            views = self._views[num_reqs] = (self.rows[:num_reqs], self.num_scheduled[:num_reqs])
        return views

    def admit(self, new: Any) -> bool:
        """Admit plain requests at once. Return False, with nothing changed, if one of them is not plain."""
        if self._core is None or not self._core.admit(new):
            return False
        self.write_special(new)
        return True

    def write_special(self, new: Any) -> None:
        """Write the sampling parameters of the newly admitted requests that native code does not write."""
        states, columns = self.states, self.states.sampling
        for i in self._core.special():
            row, params = states.row_of(new[i].req_id), sampling_params(new[i].sampling_params)
            admission = columns.num_admissions - len(new) + i
            make(() if params is None else columns.set(row, params, states.vocab_size, admission))

    def finish(self, ids: Collection[str]) -> bool:
        """Free the rows of the live requests among these ids, in their order. Return False, with nothing changed, if
        more has to change.
        """
        return self._core is not None and bool(self._core.finish(ids))
