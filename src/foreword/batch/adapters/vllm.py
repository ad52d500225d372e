"""Apply vLLM's scheduler output, the difference between two steps, in the form of either generation of its runner.

`apply` reads objects shaped like vLLM's `SchedulerOutput`, `NewRequestData` and `CachedRequestData`; vLLM itself is
not imported. The order is the protocol's:

    finished ids leave            (an id that is both finished and scheduled names two requests, one after the other)
    preempted ids are kept        (row and blocks freed, tokens kept)
    new requests enter            (a known id is replaced; prefill_token_ids holds prompt + outputs of a resumed one)
    cached requests continue      (blocks appended; for resumed ids, replaced; computed tokens as sent)

A running request that is not scheduled keeps its row and its state. An output with zero tokens is applied too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from foreword.batch.adapters.vllm_fields import KnownFields
from foreword.batch.adapters.vllm_front import FastPath
from foreword.batch.adapters.vllm_preempted import PreemptedRequest, preempt, resume
from foreword.batch.adapters.vllm_requests import new_request
from foreword.batch.state.admission import token_ids
from foreword.batch.state.request_states import RequestStates
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.plan import Plan, PlannedStep, RaggedDrafts
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import CapacityError, ForewordError, PlanError, RequestError
from foreword.integers import int32s

Refused = Callable[[str, ForewordError], object]
_UNREAD = -1  # the number of drafts of a plan that is not in arrays yet


class AppliedStep(PlannedStep):
    """The step to prepare after the difference was applied: {req_id: tokens}, in the scheduler's order.

    plan: (rows, num_scheduled) int32 [B]. draft_tokens: {req_id: [ids]} or None; −1 is a draft whose id is not known
    here. These calls are equivalent:
        prepare_inputs(states, applied, buffers)                                                  the shortest way
        prepare_inputs(states, applied, buffers, draft_tokens=applied.draft_tokens)
        prepare_inputs(states, applied.plan, buffers, draft_tokens=applied.draft_tokens)

    The arrays are valid until the next `apply` on the same states.
    """

    __slots__ = ("_front", "_output", "draft_tokens", "num_draft_ids", "plan")

    def __init__(self, output: Any, front: FastPath, num_draft_ids: int) -> None:
        self._output = output
        self._front = front
        self.plan = front.plan(len(output.num_scheduled_tokens))
        self.num_draft_ids = num_draft_ids
        self.draft_tokens = output.scheduled_spec_decode_tokens or None

    @property
    def arrays(self) -> Plan:
        front, (rows, counts) = self._front, self.plan
        if self.num_draft_ids == _UNREAD:
            drafts_of = self._output.scheduled_spec_decode_tokens or {}
            self.num_draft_ids = _read_plan(front.states, front, self._output.num_scheduled_tokens, drafts_of)
        if not self.num_draft_ids:
            return rows, counts, None, None
        drafts = RaggedDrafts(front.num_drafts[: len(rows)], front.draft_ids[: self.num_draft_ids])
        return rows, counts, drafts, None

    @property
    def block_ops(self) -> BlockOps:
        """The blocks to zero and to copy before the step."""
        zero = getattr(self._output, "new_block_ids_to_zero", None)
        copies = getattr(self._output, "kv_cache_block_copies", None)
        if not zero and not copies:
            return BlockOps.NONE
        return BlockOps.of(zero or (), copies or (), null_block=self._front.states.null_block)

    @property
    def encoder_inputs(self) -> Mapping[str, Sequence[int]]:
        """The feature indices to encode before the step, by request id."""
        return self._output.scheduled_encoder_inputs or {}

    @property
    def free_encoder_inputs(self) -> Sequence[str]:
        """The identifiers whose encoder outputs may be dropped."""
        return self._output.free_encoder_mm_hashes or ()

    @property
    def has_structured_output(self) -> bool:
        """Return whether this step has a grammar bitmask."""
        return bool(getattr(self._output, "has_structured_output_requests", False))

    def in_order(self, req_ids: Sequence[str]) -> Mapping[str, int]:
        """Return the plan of these requests in this order. Raise KeyError for one that is not scheduled."""
        counts = self._output.num_scheduled_tokens
        return {req_id: counts[req_id] for req_id in req_ids}

    def __getitem__(self, req_id: str) -> int:
        return int(self._output.num_scheduled_tokens[req_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._output.num_scheduled_tokens)

    def __len__(self) -> int:
        return len(self._output.num_scheduled_tokens)


class VllmAdapter:
    """The values that `apply` keeps per vLLM scheduler in addition to its `RequestStates`.

    preempted: requests without row and blocks, which a later output may resume by id.
    bidirectional: modalities whose embedded positions see each other, as ("image", "video") for Gemma 3. Set it before
    the first output: it is a property of the model, which no scheduler output contains.
    """

    def __init__(self, states: RequestStates) -> None:
        self.states = states
        self.preempted: dict[str, PreemptedRequest] = {}
        self.bidirectional: Collection[str] = ()
        self._front = FastPath(states)
        self._known_fields = KnownFields()

    @staticmethod
    def of(states: RequestStates) -> VllmAdapter:
        """Return the adapter of these states; create it on first use."""
        adapter = states._adapters.get(VllmAdapter)
        if adapter is None:
            adapter = states._adapters[VllmAdapter] = VllmAdapter(states)
        return adapter

    def apply(self, scheduler_output: Any, refused: Refused | None = None) -> AppliedStep:
        front = self._front
        if type(scheduler_output) is not self._known_fields.plain_type:
            self._known_fields.check(scheduler_output)
        num_draft_ids = -1 if self.preempted else front.apply(scheduler_output)
        if num_draft_ids < 0:
            num_draft_ids = self._apply_rest(scheduler_output, -1 - num_draft_ids, refused)
        return AppliedStep(scheduler_output, front, num_draft_ids)

    def _apply_rest(self, out: Any, done: int, refused: Refused | None) -> int:
        """Apply the parts that `FastPath.apply` left after ``done`` parts. Return the number of drafts."""
        states, front, new = self.states, self._front, out.scheduled_new_reqs
        if done < 1 and out.finished_req_ids:
            self._finish(out.finished_req_ids)
        if done < 2:
            for rid in sorted(getattr(out, "preempted_req_ids", None) or ()):
                if rid in states:
                    self.preempted[rid] = preempt(states, rid)
            if new and (self.preempted or not front.admit(new)):
                for data in new:
                    with _reporting(data.req_id, refused):
                        self._enter(data, refused is not None)
        elif new:
            front.write_special(new)
        cached, counts, drafts = out.scheduled_cached_reqs, out.num_scheduled_tokens, out.scheduled_spec_decode_tokens
        num_draft_ids = front.step(cached, counts, drafts)
        if num_draft_ids < 0:  # an unusual output is applied in Python, entry by entry
            if cached.req_ids:
                self._continue(cached, refused)
            # A follower's plan may have requests that were refused. Reading the plan then raises the error.
            num_draft_ids = _read_plan(states, front, counts, drafts or {}) if refused is None else _UNREAD
        return num_draft_ids

    def _finish(self, finished: Collection[str]) -> None:
        """Free the rows of finished requests in ascending order, so that every rank frees them in the same order."""
        if not self._front.finish(finished):
            for rid in sorted(finished):
                self.states.remove_request(rid)
        for rid in finished if self.preempted else ():
            self.preempted.pop(rid, None)

    def _enter(self, data: Any, is_follower: bool) -> None:
        """Admit a request. A follower, which does not sample, admits it without unsupported parameters."""
        self.states.remove_request(data.req_id)  # a resumed request, or a session whose prompt grew
        try:
            request = new_request(data, bidirectional=self.bidirectional)
            row = self.states.add_request(request)
        except ForewordError:
            if not is_follower:
                raise
            request = new_request(data, with_params=False, bidirectional=self.bidirectional)
            row = self.states.add_request(request)
        preempted, params = self.preempted.pop(request.req_id, None), request.sampling_params
        if preempted is not None and isinstance(params, SamplingParams) and params.seed is None:
            self.states.sampling.seed[row] = preempted.seed  # the same request again, with its outputs

    def _continue(self, cached: Any, refused: Refused | None) -> None:
        """Apply CachedRequestData, whose lists have entry i for req_ids[i]. A list that a generation does not use is
        empty.
        """
        for name in ("new_block_ids", "num_computed_tokens"):
            if len(getattr(cached, name)) != len(cached.req_ids):
                raise PlanError("scheduled_cached_reqs has lists of different lengths", tensor=name,
                                expected=len(cached.req_ids), got=len(getattr(cached, name)))  # fmt: skip
        for i, rid in enumerate(cached.req_ids):
            with _reporting(rid, refused):
                self._continue_one(cached, i, rid)

    def _continue_one(self, cached: Any, i: int, rid: str) -> None:
        states, progress = self.states, self.states._progress
        new_tokens = getattr(cached, "new_token_ids", None) or ()
        num_outputs = getattr(cached, "num_output_tokens", None) or ()
        blocks, computed = cached.new_block_ids[i], int(cached.num_computed_tokens[i])
        if rid in cached.resumed_req_ids:
            self._resume(rid, blocks, computed, (getattr(cached, "all_token_ids", None) or {}).get(rid))
            return
        row = states.row_of(rid)
        if computed < 0:
            raise RequestError(rid, "num_computed_tokens", computed, "must be 0 or more", "Count from the start.")
        if blocks is not None:
            states.append_blocks(rid, blocks)
        if new_tokens and len(new_tokens[i]):  # a pipeline rank that did not sample them itself
            tokens = token_ids(rid, "new_token_ids", new_tokens[i], states.vocab_size)
            progress.write_tokens(rid, row, computed, tokens)
        if num_outputs and states.num_placeholders[row] == 0:
            progress.truncate(row, int(states.prompt_len[row]) + int(num_outputs[i]))
        progress.set_computed(row, computed)

    def _resume(self, rid: str, blocks: Any, computed: int, all_tokens: Sequence[int] | None) -> None:
        """Replace the blocks of a resumed request. It samples after every token that is known now has been computed."""
        states = self.states
        if rid not in self.preempted:
            if rid not in states:
                raise RequestError(rid, "resumed_req_ids", rid, "is unknown", "Send it as a new request.")
            self.preempted[rid] = preempt(states, rid)
        preempted = self.preempted[rid]
        outputs = None
        if all_tokens is not None:
            request = preempted.request
            prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
            outputs = all_tokens[0 if prompt is None else len(prompt) :]
        empty: list[list[int]] = [[] for _ in states.block_tables]
        resume(states, preempted, empty if blocks is None else blocks, computed, outputs)
        del self.preempted[rid]


def apply(states: RequestStates, scheduler_output: Any, *, refused: Refused | None = None) -> AppliedStep:
    """Apply the scheduler's decision to the states and return the step to prepare.

    Raise RequestError or CapacityError for the first entry that does not fit; the entries before it are applied then.
    Raise PlanError, with nothing applied, for a value in a field that is refused. A field of a later release, which is
    not known here, causes one RuntimeWarning.

    refused: for a follower of another engine. refused(req_id, error) is called for each request whose entry does not
    fit, and the others are applied; sampling parameters that are not supported here are left out.
    """
    return VllmAdapter.of(states).apply(scheduler_output, refused)


@contextmanager
def _reporting(req_id: str, refused: Refused | None) -> Iterator[None]:
    """Pass an error of a request's entry to ``refused``, if it is given."""
    try:
        yield
    except ForewordError as error:
        if refused is None:
            raise
        refused(req_id, error)


def _read_plan(
    states: RequestStates, front: FastPath, counts: Mapping[str, int], drafts: Mapping[str, Sequence[int]]
) -> int:
    """Write the plan into the arrays of the fast path. Return the number of drafts."""
    B = len(counts)
    if states.max_num_reqs < B:
        raise CapacityError(
            f"{B} requests in one step, max_num_reqs is {states.max_num_reqs}",
            tensor="max_num_reqs",
            expected=states.max_num_reqs,
            got=B,
        )
    front.rows[:B] = np.fromiter(map(states.row_of, counts), np.int32, B)
    front.num_scheduled[:B] = int32s(list(counts.values()), "num_scheduled_tokens")
    given = RaggedDrafts.of(counts, drafts)
    if given is None:
        return 0
    num_drafts, ids = given
    if len(ids) > len(front.draft_ids):
        raise CapacityError(f"{len(ids)} drafts in one step, room for {len(front.draft_ids)}")
    front.num_drafts[:B], front.draft_ids[: len(ids)] = num_drafts, ids
    return len(ids)
