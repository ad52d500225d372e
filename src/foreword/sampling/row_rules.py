"""The rules of requests by state row, and the counts of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch import InputBuffers, RequestStates, SamplingParams, StepNeeds
from foreword.batch.values.parameters import CHANGING
from foreword.native import available, native
from foreword.sampling.reference import ReferenceRows
from foreword.sampling.rules import RequestRules
from foreword.versions import Memo

_CHANGING = int(CHANGING)
_NO_PARAMS = SamplingParams()
_HALF_SET = -1  # the stamp of rules that may be in `core` or not; stamps of requests are positive


def make_rows(states: RequestStates, vocab_size: int, **others: AnyArray) -> Any:
    """Return native `SamplingRows` over the columns of some states, or `ReferenceRows` with the same methods where
    native code is not built. others: columns in place of those of the states.
    """
    make: Any = native.SamplingRows if available() else ReferenceRows
    return make(states.sampling.by_name | others, states.token_ids, states.prompt_len, states.num_tokens, vocab_size)


class RowRules:
    """The rules of the requests in some states, and the counts of their tokens.

    They are a cache of data in the parameters objects and token ids of the states. A row's rules are made when the
    row is first sampled, and made again after its stamp in `SamplingColumns` changed.

    core: see `make_rows`.
    eos_token_ids: the model's end tokens; they end an output unless its parameters say ignore_eos.
    """

    __slots__ = ("_columns", "_eos_token_ids", "_stamp", "_updated", "core")

    def __init__(self, states: RequestStates, eos_token_ids: Iterable[int] = ()) -> None:
        self._columns, self._eos_token_ids = states.sampling, frozenset(eos_token_ids)
        self._stamp: I64 = np.zeros(states.max_num_reqs, np.int64)  # the stamp of the rules in `core`; 0 for none
        self._updated = Memo[StepNeeds, bool]()  # True for the needs of the last step
        self.core: Any = make_rows(states, states.vocab_size)

    def buffers(self, buffers: InputBuffers) -> native.SamplingBuffers | None:
        """Return the native sampling of steps in these buffers, for those without masks, custom processors,
        log-probabilities and embeddings; None where native code is not built.
        """
        return None if isinstance(self.core, ReferenceRows) else buffers.attach(self, self._native_buffers)

    def _native_buffers(self, buffers: InputBuffers) -> native.SamplingBuffers:
        names = (
            "idx_mapping",
            "num_computed_tokens",
            "cu_num_logits",
            "positions",
            "logits_indices",
            "draft_token_ids",
        )
        return native.SamplingBuffers(self.core, *(buffers[name] for name in names))

    def update(self, step: StepNeeds) -> None:
        """Make the rules of a step's requests, and drop those of requests that have gone."""
        if self._updated.find(step) is not None:
            return
        self._updated.forget()
        columns, stamp = self._columns, self._stamp
        for row in ((stamp != 0) & (stamp != columns.stamp)).nonzero()[0].tolist():
            self.core.forget(row)
            stamp[row] = 0
        if step.needs & _CHANGING:
            rows = step.rows[(columns.needs[step.rows] & _CHANGING != 0) & (stamp[step.rows] == 0)]
            for row in rows.tolist():
                # so that an interrupt before the last line leaves no rules that are never dropped
                stamp[row] = _HALF_SET
                self.core.set(row, *RequestRules.of(columns.params.get(row, _NO_PARAMS), self._eos_token_ids))
                stamp[row] = columns.stamp[row]
        self._updated.keep(step, True)
