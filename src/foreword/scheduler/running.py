"""The running requests: their rows, and the values that the scheduler reads in every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foreword.arrays import I32, Bools
from foreword.batch import RequestStates
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.request import NO_TOKENS, Request


class Share(NamedTuple):
    """The share of rows in a step: the num_scheduled[i] tokens after the first computed[i]. num_tokens: their sum."""

    rows: I32
    computed: I32
    num_scheduled: I32
    num_tokens: int

    @property
    def end(self) -> I32:
        """Return the number of computed tokens of each row after the step, int32 [len(rows)]."""
        return self.computed + self.num_scheduled


NO_SHARE = Share(NO_TOKENS, NO_TOKENS, NO_TOKENS, 0)


class RunningSet:
    """The requests that hold a row, in the order of admission.

    rows: int32 [n], replaced whenever a request enters or leaves, so that the same array means the same requests.
    max_len: int32 [R], by row: the number of known tokens at which its request ends.
    streams: bool [R], by row: whether the tokens of its request are awaited one by one. has_streamed: whether any
    request has been such.
    may_prefill: whether a request may still compute its prompt.
    """

    def __init__(self, states: RequestStates) -> None:
        num_rows = states.max_num_reqs
        self.rows = NO_TOKENS
        self.max_len = np.zeros(num_rows, np.int32)
        self.streams = np.zeros(num_rows, np.bool_)
        self.has_streamed = False
        self.may_prefill = False
        self._prefill_len = states.prefill_len
        self._by_row: list[Request | None] = [None] * num_rows
        self._is_running = np.zeros(num_rows, np.bool_)
        self._spans_end = np.zeros(num_rows, np.int32)  # by row: the end of its last span
        self._has_spans = False  # whether any request has had spans
        self._num_in_flight = np.zeros(num_rows, np.int32)  # by row: 0, but during `num_in_flight`

    def __len__(self) -> int:
        return len(self.rows)

    def request_in(self, row: int) -> Request:
        """Return the request in a row that is not free."""
        request = self._by_row[row]
        assert request is not None, f"row {row} holds no request"
        return request

    def enter(self, request: Request) -> None:
        """Add a request that has got its row."""
        row = request.row
        self._by_row[row] = request
        self._is_running[row] = True
        self.rows = np.concatenate((self.rows, np.array([row], np.int32)))
        self.max_len[row] = request.max_len
        self.streams[row] = request.streams
        self.has_streamed |= request.streams
        self._spans_end[row] = request.spans[-1, 1] if len(request.spans) else 0
        self._has_spans |= len(request.spans) > 0
        self.may_prefill = True

    def leave(self, rows: I32) -> list[Request]:
        """Remove the requests of these rows, and return them."""
        requests = [self.request_in(row) for row in rows.tolist()]
        self._is_running[rows] = False
        self.rows = self.rows[self._is_running[self.rows]]
        for request in requests:
            self._by_row[request.row] = None
        return requests

    def clear(self) -> None:
        """Remove every request, even if a change was interrupted."""
        self.rows = NO_TOKENS
        self._by_row[:] = [None] * len(self._by_row)
        self._is_running[:] = False
        self._num_in_flight[:] = 0

    def prefilling(self, share: Share) -> tuple[I32, int]:
        """Return the rows of a share of the running set that still compute their prompt, and the number of their
        tokens in the share.
        """
        if not self.may_prefill:
            return NO_TOKENS, 0
        is_prompt = share.computed < self._prefill_len.take(share.rows)
        prefilling = share.rows[is_prompt]
        self.may_prefill = len(prefilling) > 0 or len(share.rows) < len(self.rows)
        return prefilling, int(share.num_scheduled[is_prompt].sum())

    def streaming(self, rows: I32, computed: I32, n: I32) -> Bools | None:
        """Return which of these rows decode, if one of them streams and computes n[i] > 0 tokens; else None."""
        decodes: Bools = computed >= self._prefill_len.take(rows)
        return decodes if (decodes & self.streams.take(rows) & (n > 0)).any() else None

    def num_in_flight(self, rows: I32, plan: StepPlan) -> I32:
        """Return how many tokens of each of these rows a plan computes, int32 [len(rows)]."""
        self._num_in_flight[plan.rows] = plan.num_scheduled
        found = self._num_in_flight[rows]
        self._num_in_flight[plan.rows] = 0
        return found

    def whole(self, rows: I32, computed: I32, n: I32, most: int = 0) -> I32:
        """Return n[i] tokens after computed[i] without parts of spans: see `Request.whole`."""
        if not self._has_spans:
            return n
        ahead = np.flatnonzero((n > 0) & (self._spans_end[rows] > computed))
        if ahead.size:
            n = n.copy()
            for i in ahead.tolist():  # requests with images that are not computed yet
                n[i] = self.request_in(int(rows[i])).whole(int(computed[i]), int(n[i]), most)
        return n
