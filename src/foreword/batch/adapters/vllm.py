"""vLLM's scheduler output, applied as it comes: the diff between two steps, of either generation of its runner.

`apply` reads objects shaped like vLLM's `SchedulerOutput`, `NewRequestData` and `CachedRequestData`; vLLM itself is
not imported. The order is the protocol's:

    finished ids leave            (an id that is both finished and scheduled names two requests, one after the other)
    preempted ids are parked      (row and blocks freed, tokens kept)
    new requests enter            (a known id is replaced; prefill_token_ids holds prompt + outputs of a resumed one)
    cached requests go on         (blocks appended; for resumed ids, replaced; computed tokens as the scheduler says)

A running request that is not scheduled keeps its row and its state. An output with zero tokens is applied all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.arrays import I32
from foreword.batch.adapters.preempted import park, resume
from foreword.batch.adapters.vllm_front import VllmFront
from foreword.batch.adapters.vllm_requests import new_request
from foreword.batch.prepare.plan import PlannedStep, int32s
from foreword.batch.values.block_ops import NO_BLOCK_OPS, BlockOps
from foreword.errors import CapacityError, PlanError, RequestError

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates

_NO_DRAFTS = np.zeros(0, np.int32), np.zeros(0, np.int32)


class AppliedStep(PlannedStep):
    """What is left to prepare once the diff is applied: {req_id: tokens}, in the scheduler's order.

    plan: (rows, num_scheduled) int32 [B]. draft_tokens: {req_id: [ids]} or None; −1 is a draft whose id is not known
    here. All of these do the same:
        prepare_inputs(states, applied, buffers)                                                  the shortest way
        prepare_inputs(states, applied, buffers, draft_tokens=applied.draft_tokens)
        prepare_inputs(states, applied.plan, buffers, draft_tokens=applied.draft_tokens)

    The arrays are valid until the next `apply` on the same states.
    """

    __slots__ = ("_arrays", "_front", "_output", "draft_tokens", "num_draft_ids", "plan")

    def __init__(self, output: Any, front: VllmFront, num_draft_ids: int) -> None:
        self._output = output
        self._front = front
        self.plan = front.plan(len(output.num_scheduled_tokens))
        self.num_draft_ids = num_draft_ids
        self.draft_tokens = output.scheduled_spec_decode_tokens or None

    @property
    def drafts(self) -> tuple[I32, I32]:
        if not self.num_draft_ids:
            return _NO_DRAFTS
        return self._front.num_drafts[: len(self.plan[0])], self._front.draft_ids[: self.num_draft_ids]

    @property
    def block_ops(self) -> BlockOps:
        """Blocks to zero and to copy before the step."""
        zero = getattr(self._output, "new_block_ids_to_zero", None)
        copies = getattr(self._output, "kv_cache_block_copies", None)
        return BlockOps.of(zero or (), copies or ()) if zero or copies else NO_BLOCK_OPS

    @property
    def encoder_inputs(self) -> Mapping[str, Sequence[int]]:
        """{req_id: feature indices} to encode before the step."""
        return self._output.scheduled_encoder_inputs or {}

    @property
    def free_encoder_inputs(self) -> Sequence[str]:
        """Identifiers whose encoder outputs may be dropped."""
        return self._output.free_encoder_mm_hashes or ()

    @property
    def has_structured_output(self) -> bool:
        """Whether a grammar bitmask will come for this step."""
        return bool(getattr(self._output, "has_structured_output_requests", False))

    def __getitem__(self, req_id: str) -> int:
        return int(self._output.num_scheduled_tokens[req_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._output.num_scheduled_tokens)

    def __len__(self) -> int:
        return len(self._output.num_scheduled_tokens)


def apply(states: RequestStates, scheduler_output: Any) -> AppliedStep:
    """Bring the states to what the scheduler decided and return the step to prepare.

    Raises RequestError or CapacityError for the first entry that does not fit, with the entries before it applied.
    """
    out = scheduler_output
    front = states.vllm_front
    if front is None:
        front = states.vllm_front = VllmFront(states)
    if out.finished_req_ids:
        _finish(states, front, out.finished_req_ids)
    if preempted := getattr(out, "preempted_req_ids", None):
        for rid in sorted(preempted):
            park(states, rid)
    if out.scheduled_new_reqs and not front.admit(out.scheduled_new_reqs):
        for data in out.scheduled_new_reqs:
            _enter(states, data)
    cached, counts, drafts = out.scheduled_cached_reqs, out.num_scheduled_tokens, out.scheduled_spec_decode_tokens
    num_draft_ids = front.step(cached, counts, drafts)
    if num_draft_ids < 0:  # something unusual: in Python, entry by entry
        if cached.req_ids:
            _go_on(states, cached)
        num_draft_ids = _read_plan(states, front, counts, drafts or {})
    return AppliedStep(out, front, num_draft_ids)


def _finish(states: RequestStates, front: VllmFront, finished: Iterable[str]) -> None:
    """Sorted, so that every rank frees its rows in the same order."""
    ids = sorted(finished)
    if not front.finish(ids):
        for rid in ids:
            states.remove_request(rid)
    for rid in ids if states.parked else ():
        states.parked.pop(rid, None)


def _enter(states: RequestStates, data: Any) -> None:
    request = new_request(data)
    states.remove_request(request.req_id)  # a resumed request, or a session whose prompt grew
    states.add_request(request)


def _go_on(states: RequestStates, cached: Any) -> None:
    """CachedRequestData: a struct of lists, entry i for req_ids[i]; lists a generation does not use are empty."""
    resumed = cached.resumed_req_ids
    all_tokens = getattr(cached, "all_token_ids", None) or {}
    new_tokens = getattr(cached, "new_token_ids", None) or ()
    num_outputs = getattr(cached, "num_output_tokens", None) or ()
    for name in ("new_block_ids", "num_computed_tokens"):
        if len(getattr(cached, name)) != len(cached.req_ids):
            raise PlanError("scheduled_cached_reqs has lists of different lengths", tensor=name,
                            expected=len(cached.req_ids), got=len(getattr(cached, name)))  # fmt: skip
    for i, rid in enumerate(cached.req_ids):
        blocks, computed = cached.new_block_ids[i], int(cached.num_computed_tokens[i])
        if rid in resumed:
            _resume(states, rid, blocks, computed, all_tokens.get(rid))
            continue
        row = states.row_of(rid)
        if computed < 0:
            raise RequestError(rid, "num_computed_tokens", computed, "must be 0 or more", "Count from the start.")
        if blocks is not None:
            states.append_blocks(rid, blocks)
        if new_tokens and len(new_tokens[i]):  # a pipeline rank that did not sample them itself
            _write_tokens(states, row, computed, states.check_token_ids(rid, "new_token_ids", new_tokens[i]))
        if num_outputs and states.num_placeholders[row] == 0:
            _truncate(states, row, int(states.prompt_len[row]) + int(num_outputs[i]))
        # An output made before the last samples were known counts drafts as computed that were rejected since.
        known = int(states.num_tokens[row]) + int(states.num_placeholders[row])
        states.num_computed_tokens[row] = min(computed, known - 1)


def _resume(states: RequestStates, rid: str, blocks: Any, computed: int, all_tokens: Sequence[int] | None) -> None:
    """Other blocks in the place of the old ones; every token known so far has to be computed before it samples."""
    if rid not in states.parked and not park(states, rid):
        raise RequestError(rid, "resumed_req_ids", rid, "is not here", "Send it as a new request.")
    parked = states.parked[rid].request
    outputs = None
    if all_tokens is not None:
        prompt = parked.prompt_token_ids if parked.prompt_token_ids is not None else parked.prompt_embeds
        outputs = all_tokens[0 if prompt is None else len(prompt) :]
    empty: list[list[int]] = [[] for _ in states.block_tables]
    resume(states, rid, empty if blocks is None else blocks, computed, outputs)


def _write_tokens(states: RequestStates, row: int, start: int, tokens: I32) -> None:
    """token_ids[row, start : start + len(tokens)] = tokens: they stand where the request's computed tokens end."""
    end = start + len(tokens)
    if start > states.num_tokens[row] or end > states.max_model_len:
        raise CapacityError(
            f"request {states.req_id_of(row)!r}: tokens {start} … {end - 1} do not follow its {states.num_tokens[row]} "
            f"known ones, or do not fit max_model_len = {states.max_model_len}"
        )
    states.token_ids[row, start:end] = tokens
    if end > states.num_tokens[row]:
        states.num_tokens[row] = end
        if end > states.prompt_len[row]:
            states.last_sampled_token[row] = tokens[-1]


def _truncate(states: RequestStates, row: int, known: int) -> None:
    """Forget outputs the scheduler took back, after cache blocks that failed to load."""
    if known < states.num_tokens[row]:
        states.num_tokens[row] = known
        states.last_sampled_token[row] = states.token_ids[row, known - 1] if known > states.prompt_len[row] else -1


def _read_plan(
    states: RequestStates, front: VllmFront, counts: Mapping[str, int], drafts: Mapping[str, Sequence[int]]
) -> int:
    """The plan into the front's arrays; how many drafts there are."""
    B = len(counts)
    if states.max_num_reqs < B:
        raise CapacityError(f"{B} requests in one step, max_num_reqs is {states.max_num_reqs}")
    front.rows[:B] = np.fromiter(map(states.row_of, counts), np.int32, B)
    front.num_scheduled[:B] = int32s(list(counts.values()), "num_scheduled_tokens")
    for rid in drafts:
        if rid not in counts:
            raise PlanError("drafts for a request that is not scheduled", request=rid, tensor="draft_tokens")
    lists = [drafts.get(rid, ()) for rid in counts]
    front.num_drafts[:B] = np.fromiter(map(len, lists), np.int32, B)
    ids = int32s([t for tokens in lists for t in tokens], "draft_tokens")
    if len(ids) > len(front.draft_ids):
        raise CapacityError(f"{len(ids)} drafts in one step, room for {len(front.draft_ids)}")
    front.draft_ids[: len(ids)] = ids
    return len(ids)
