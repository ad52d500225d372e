"""Prepare a checked batch from a scheduler's plan, also for steps in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np

from foreword.arrays import I32
from foreword.batch.prepare.backends import loops, native, vectorized
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.prepare.plan import NO_PADDING, normalize, padding
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.tensors import BackendFunction, TensorBackend
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.plan import Backend, Check, Drafts, Order, PlanLike, RaggedDrafts
from foreword.errors import PlanError
from foreword.integers import int32s
from foreword.native import available

BACKENDS: dict[str, BackendFunction] = {"loops": loops.run, "numpy": vectorized.run, "native": native.run}
"""The backends in host memory."""
AUTO: Backend = "native" if available() else "numpy"
_DEVICE = "foreword.device.backend"
"""The module of the backend "device", which defines ``DEVICE``. It needs more than NumPy, so the first step with this
backend imports it."""


def backend_of(backend: Backend | BackendFunction) -> BackendFunction:
    """Return the function of a backend. Raise PlanError for an unknown name, ConfigError for "device" if its packages
    are missing.
    """
    if callable(backend):
        return backend
    run = BACKENDS.get(AUTO if backend == "auto" else backend)
    if run is not None:
        return run
    if backend != "device":
        raise PlanError(f"backend={backend!r}: must be 'auto', 'native', 'numpy', 'loops', 'device' or a function")
    device: BackendFunction = import_module(_DEVICE).DEVICE
    return device


def prepare_inputs(
    states: RequestStates,
    plan: PlanLike,
    buffers: InputBuffers,
    *,
    draft_tokens: Drafts = None,
    pad_to: tuple[int | None, int | None] | None = None,
    order: Order = "given",
    backend: Backend | BackendFunction = "auto",
    gather_block_tables: bool = True,
    block_ops: BlockOps = BlockOps.NONE,
    check: Check = "off",
) -> InputBatch:
    """Turn the scheduler's choice into the tensors of a step.

    plan: {req_id: tokens to schedule}, or (rows, num_scheduled) int32 [B]. A count includes the request's drafts.
    draft_tokens: {req_id: [ids]}, or with array plans int32 [B, D] padded with −1; drafts take the last positions.
    pad_to: (num_tokens, num_reqs) of a captured graph; None in either place means no padding of that axis.
    order: "given", or "decode_first": stable by (no drafts, tokens != 1 + max_num_draft_tokens, tokens).
    backend: "auto" is native if it is built, else numpy. "device" also makes the tensors on a GPU, where they are
    `InputBatch.tensors`; it needs PyTorch and Triton. All give equal bits, and so does a function such as
    `foreword.device.backend.DeviceBackend`.
    block_ops: blocks to zero and to copy before the step; the batch carries them to the executor.
    gather_block_tables: False leaves `InputBatch.block_table` out, for kernels that read the states' own tables.
    check: "bounds" compares the step's sums and bounds, O(B); "full" checks every tensor and every slot that is read or
    written, see `foreword.batch.proof.checker`. A batch that they refuse must not be run.

    Raises PlanError if a row would read or write something that it must not, CapacityError past the buffers,
    RequestError
    for an unknown id. A refused plan changes nothing. A batch refused by ``check`` is not counted as a step, but the
    buffers have been written: the batch before on the same buffers is stale. The drafts of a step are staged in
    `RequestStates.token_ids` past the known tokens; nothing else of the states changes before `RequestStates.commit`.
    """
    if buffers.states is not states:
        raise PlanError("these buffers were made for other states: use InputBuffers.for_states(states, …)")
    wanted = normalize(states, plan, draft_tokens, order)
    run = backend_of(backend)
    pad = NO_PADDING if pad_to is None else padding(pad_to)
    scalars = run(states, buffers, wanted, pad, gather_block_tables)
    req_ids = list(plan) if type(plan) is dict and order == "given" else None  # otherwise found by row on demand
    batch = InputBatch(states, buffers, scalars, req_ids, gather_block_tables, block_ops, run, check)
    if check != "off":
        _check(batch, check)
    states._step = batch.step
    return batch


def _check(batch: InputBatch, level: Check) -> None:
    from foreword.batch.proof.checker import run_check  # imported here because only checks need the specification

    run_check(batch, level)
    if level == "full" and isinstance(batch._backend, TensorBackend):
        batch._backend.check(batch)


def advance(states: RequestStates, batch: InputBatch) -> None:
    """Count a step as done before its samples are known, so that the next one can be prepared. Call it once, before the
    commit.

    All of its drafts count as accepted; see `foreword.batch.prepare.commit`. Raises PlanError for a batch advanced or
    committed before, of other states, or not resolved.
    """
    batch._advance(states)


def resolve(batch: InputBatch, draft_tokens: Drafts = None) -> None:
    """Update a step that was prepared early, once the step before it is committed.

    Afterwards every tensor equals that of a step that is prepared now from the same plan: rejected drafts are removed
    from positions and lengths, and sampled tokens replace placeholders. A request that was
    removed meanwhile keeps its tokens and is cancelled: token 0, positions from 0, slots −1, null blocks.
    draft_tokens: the ids of drafts that were planned as −1, at most as many as planned.

    Raises PlanError while the step before is not committed, and after `advance` or `RequestStates.commit`.
    """
    batch._check_open()
    states = batch.states
    rows, counts = batch.idx_mapping.copy(), batch.num_scheduled_tokens.copy()
    step = batch.scalars
    cancelled = states.row_generation.take(rows) != batch.row_generation
    drafts = None
    if step.num_draft_tokens:
        ids = batch.draft_token_ids.copy() if draft_tokens is None else _filled_in(batch, draft_tokens)
        drafts = RaggedDrafts(batch.num_draft_tokens.copy(), ids)
    elif draft_tokens is not None:
        _filled_in(batch, draft_tokens)
    plan = rows, counts, drafts, cancelled if cancelled.any() else None
    pad = step.num_tokens_padded, step.num_reqs_padded
    batch._update(batch._backend(states, batch.buffers, plan, pad, batch.is_gathered))
    if not batch.is_resolved:  # the step has not changed in this case
        b = int(np.argmax(batch.num_placeholders > 0))
        raise PlanError("the step before is not committed", step=batch.step, request=batch.req_ids[b], index=b)
    if batch.check != "off":
        _check(batch, batch.check)


def admit_drafts(
    batch: InputBatch, num_admitted: Mapping[str, int] | I32, *, pad_to: tuple[int | None, int | None] | None = None
) -> None:
    """Reduce a prepared step to the drafts that verification admits, if their budget is known only after the scheduler
    planned.

    num_admitted: the number of drafts that each request keeps, the first ones; int32 [B], or {req_id: count}, in which
    a missing request keeps all drafts. With a of k drafts admitted, the request has n − k + a tokens, and every tensor
    of the batch equals that of a step that is prepared now with only these drafts: num_draft_tokens is a, and
    query_start_loc,
    seq_lens, the slots and the logit rows are those of the remaining tokens.
    pad_to: as for `prepare_inputs`; the trimmed step may fit a smaller graph than the one that was planned.
    `RequestStates.commit` takes at most a + 1 samples of the request. A scheduler that counted k drafts must subtract k
    − a tokens in addition to those that verification rejects. Blocks of removed tokens still belong to the request.

    Raise PlanError for a count outside 0 … k, for a request that is not in the batch, and after `advance` or
    `RequestStates.commit`. A refused call changes nothing.
    """
    batch._check_open()
    planned, n = batch.num_draft_tokens.copy(), batch.num_scheduled_tokens.copy()
    if isinstance(num_admitted, Mapping):
        given: list[int] = planned.tolist()
        index = {req_id: b for b, req_id in enumerate(batch.req_ids)}
        for req_id, count in num_admitted.items():
            if req_id not in index:
                raise PlanError("drafts of a request that is not in this batch", step=batch.step, request=req_id,
                                tensor="num_admitted")  # fmt: skip
            given[index[req_id]] = count
        admitted = int32s(given, "num_admitted")
    else:
        admitted = int32s(num_admitted, "num_admitted")
    if admitted.shape != planned.shape:
        raise PlanError("one count per request", step=batch.step, tensor="num_admitted", expected=planned.shape,
                        got=admitted.shape)  # fmt: skip
    if (bad := (admitted < 0) | (admitted > planned)).any():
        b = int(np.argmax(bad))
        raise PlanError("more drafts admitted than planned, or fewer than none", step=batch.step,
                        request=batch.req_ids[b], tensor="num_admitted", index=b, expected=f"0 … {planned[b]}",
                        got=int(admitted[b]))  # fmt: skip
    local = np.arange(len(batch.draft_token_ids)) - np.repeat(batch.cu_num_draft_tokens[:-1], planned)
    ids = batch.draft_token_ids[local < np.repeat(admitted, planned)]
    drafts = RaggedDrafts(admitted, ids) if len(ids) else None
    cancelled = batch.row_generation == -1
    plan = batch.idx_mapping.copy(), n - planned + admitted, drafts, cancelled if cancelled.any() else None
    pad = padding(pad_to)
    batch._update(batch._backend(batch.states, batch.buffers, plan, pad, batch.is_gathered))
    if batch.check != "off":
        _check(batch, batch.check)


def _filled_in(batch: InputBatch, drafts: Mapping[str, Sequence[int]] | I32) -> I32:
    """Return the batch's drafts with the given ids. A request without ids keeps its planned drafts; missing ids stay
    −1.
    """
    ids, starts = batch.draft_token_ids.copy(), batch.cu_num_draft_tokens
    given = drafts.items() if isinstance(drafts, Mapping) else zip(batch.req_ids, drafts, strict=True)
    index = {req_id: b for b, req_id in enumerate(batch.req_ids)}
    for req_id, tokens in given:
        if req_id not in index:
            raise PlanError("drafts for a request that is not in this batch", request=req_id, tensor="draft_tokens")
        b = index[req_id]
        planned = ids[starts[b] : starts[b + 1]]
        known = [t for t in tokens if t >= 0]
        if len(known) > len(planned):
            raise PlanError("more drafts than planned", step=batch.step, request=req_id, tensor="draft_tokens",
                            index=b, expected=len(planned), got=len(known))  # fmt: skip
        if known:
            planned[: len(known)] = known
            planned[len(known) :] = -1
    return ids
