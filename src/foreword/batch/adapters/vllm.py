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

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreword.batch.adapters.vllm_requests import new_request
from foreword.batch.block_ops import NO_BLOCK_OPS, BlockOps
from foreword.batch.parking import park, resume
from foreword.batch.plan import Plan, PlannedStep
from foreword.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from foreword.batch.states import RequestStates

I32 = npt.NDArray[np.int32]
_NONE = np.zeros(0, np.int32)


class AppliedStep(PlannedStep):
    """What is left to prepare once the diff is applied: {req_id: tokens}, in the scheduler's order.

    plan: (rows, num_scheduled) int32 [B]. draft_tokens: {req_id: [ids]} or None; −1 is a draft whose id is not known
    here. All of these do the same:
        prepare_inputs(states, applied, buffers)                                                  the shortest way
        prepare_inputs(states, applied, buffers, draft_tokens=applied.draft_tokens)
        prepare_inputs(states, applied.plan, buffers, draft_tokens=applied.draft_tokens)
    block_ops: blocks to zero and to copy before the step. encoder_inputs: {req_id: feature indices} to encode first;
    free_encoder_inputs: identifiers the encoder cache may drop. has_structured_output: a grammar bitmask will come.

    The arrays are valid until the next `apply` on the same states.
    """

    __slots__ = ("_counts", "arrays", "block_ops", "draft_tokens", "encoder_inputs", "free_encoder_inputs",
                 "has_structured_output")  # fmt: skip

    def __init__(self, counts: Mapping[str, int], arrays: Plan, drafts: Mapping[str, Sequence[int]] | None) -> None:
        self._counts = counts
        self.arrays = arrays
        self.draft_tokens = drafts
        self.block_ops: BlockOps = NO_BLOCK_OPS
        self.encoder_inputs: Mapping[str, Sequence[int]] = {}
        self.free_encoder_inputs: Sequence[str] = ()
        self.has_structured_output = False

    @property
    def plan(self) -> tuple[I32, I32]:
        return self.arrays.rows, self.arrays.num_scheduled

    def __getitem__(self, req_id: str) -> int:
        return self._counts[req_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


def apply(states: RequestStates, scheduler_output: Any) -> AppliedStep:
    """Bring the states to what the scheduler decided and return the step to prepare.

    Raises RequestError or CapacityError for the first entry that does not fit, with the entries before it applied.
    """
    out = scheduler_output
    _leave(states, out)
    for data in out.scheduled_new_reqs:
        _enter(states, data)
    cached = out.scheduled_cached_reqs
    if cached.req_ids:
        _go_on(states, cached)
    drafts = out.scheduled_spec_decode_tokens or None
    applied = AppliedStep(out.num_scheduled_tokens, _arrays(states, out.num_scheduled_tokens, drafts), drafts)
    _pass_on(applied, out)
    return applied


def _leave(states: RequestStates, out: Any) -> None:
    if out.finished_req_ids:
        for rid in sorted(out.finished_req_ids):  # so that every rank frees its rows in the same order
            states.remove_request(rid)
    if getattr(out, "preempted_req_ids", None):
        for rid in sorted(out.preempted_req_ids):
            park(states, rid)


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
    for i, rid in enumerate(cached.req_ids):
        blocks, computed = cached.new_block_ids[i], int(cached.num_computed_tokens[i])
        if rid in resumed:
            _resume(states, rid, blocks, computed, all_tokens.get(rid))
            continue
        row = states.row_of(rid)
        if blocks is not None:
            states.append_blocks(rid, blocks)
        if new_tokens and len(new_tokens[i]):  # a pipeline rank that did not sample them itself
            _write_tokens(states, row, computed, new_tokens[i])
        if num_outputs and states.num_placeholders[row] == 0:
            _truncate(states, row, int(states.prompt_len[row]) + int(num_outputs[i]))
        states.num_computed_tokens[row] = computed


def _resume(states: RequestStates, rid: str, blocks: Any, computed: int, all_tokens: Sequence[int] | None) -> None:
    """Other blocks in the place of the old ones; every token known so far has to be computed before it samples."""
    if rid not in states.parked and not park(states, rid):
        raise RequestError(rid, "resumed_req_ids", rid, "is not here", "Send it as a new request.")
    parked = states.parked[rid]
    outputs = None
    if all_tokens is not None:
        prompt = parked.prompt_token_ids if parked.prompt_token_ids is not None else parked.prompt_embeds
        outputs = all_tokens[0 if prompt is None else len(prompt) :]
    empty: list[list[int]] = [[] for _ in states.block_tables]
    resume(states, rid, empty if blocks is None else blocks, computed, outputs)


def _write_tokens(states: RequestStates, row: int, start: int, tokens: Sequence[int]) -> None:
    """token_ids[row, start : start + len(tokens)] = tokens: they stand where the request's computed tokens end."""
    end = start + len(tokens)
    if end > states.max_model_len:
        raise CapacityError(f"request {states.req_id_of(row)!r}: {end} tokens do not fit max_model_len")
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


def _arrays(states: RequestStates, counts: Mapping[str, int], drafts: Mapping[str, Sequence[int]] | None) -> Plan:
    rows = np.fromiter(map(states.row_of, counts), np.int32, len(counts))
    num_scheduled = np.fromiter(counts.values(), np.int32, len(counts))
    if not drafts:
        return Plan(rows, num_scheduled, _NONE, _NONE)
    lists = [drafts.get(rid, ()) for rid in counts]
    ids = np.array([t for tokens in lists for t in tokens], np.int32)
    return Plan(rows, num_scheduled, np.fromiter(map(len, lists), np.int32, len(lists)), ids)


def _pass_on(applied: AppliedStep, out: Any) -> None:
    """What a forward pass needs besides tensors, where this generation's output has it."""
    zero, copies = getattr(out, "new_block_ids_to_zero", None), getattr(out, "kv_cache_block_copies", None)
    if zero or copies:
        applied.block_ops = BlockOps.of(zero or (), copies or ())
    if out.scheduled_encoder_inputs:
        applied.encoder_inputs = out.scheduled_encoder_inputs
    if out.free_encoder_mm_hashes:
        applied.free_encoder_inputs = out.free_encoder_mm_hashes
    applied.has_structured_output = bool(getattr(out, "has_structured_output_requests", False))
