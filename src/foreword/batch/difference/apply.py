"""A difference applied to another process's states."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.batch.difference.arrays import Arrays, check_range
from foreword.batch.difference.encoding import malformed
from foreword.batch.difference.mirror import admit, checksum, columns, geometry, remove, spans
from foreword.batch.difference.value import StepDifference
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.prepare.prepare import backend_of
from foreword.batch.state.admission import check_block_ids
from foreword.batch.state.changes import make
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.plan import Backend, Plan, RaggedDrafts
from foreword.errors import PlanError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def apply_difference(
    states: RequestStates, difference: StepDifference, buffers: InputBuffers, *, backend: Backend = "auto"
) -> InputBatch:
    """Bring the states to where the recorder's were, and prepare the step: every tensor and column equals the
    recorder's. Differences are applied in the order taken, each once; a snapshot is applied to new states.

    Raises PlanError for states that the difference does not belong to, with nothing changed. PlanError, RequestError or
    CapacityError for values out of range: continue after those with new states and a snapshot.
    """
    if buffers.states is not states:
        raise PlanError("these buffers were made for other states: use InputBuffers.for_states(states, …)")
    run = backend_of(backend)
    _check_base(states, difference)
    for req_id, given in zip(difference.req_ids, difference.extras, strict=False):
        if "sampling_params" in given:
            given["sampling_params"].check(req_id, states.vocab_size)
    arrays = Arrays(difference.arrays)
    plan, ops = _step(states, arrays)
    remove(states, arrays.int32("removed", high=states.max_num_reqs - 1))
    swaps = arrays.pairs("swaps")
    if len(swaps) > states.max_num_reqs:
        raise malformed("swaps", expected=f"at most {states.max_num_reqs} pairs", got=len(swaps))
    for first, second in swaps.tolist():
        states.swap_rows(first, second)
    admit(states, arrays, difference.req_ids, difference.extras)
    _write(states, arrays, np.sort(plan[0]))
    arrays.check_all_read()
    states.sampling.num_admissions, states.sampling.base_seed = difference.num_admissions, difference.base_seed
    scalars = run(states, buffers, plan, difference.pad_to, difference.gather)
    before, states._step = states._step, difference.step - 1
    batch = InputBatch(states, buffers, scalars, None, difference.gather, ops, run)
    states._step = max(before, difference.step)
    return batch


def _check_base(states: RequestStates, difference: StepDifference) -> None:
    if difference.base is None:
        if states.sampling.num_admissions or len(states):
            raise PlanError("a snapshot is applied to new states", tensor="base", expected="no admissions",
                            got=states.sampling.num_admissions)  # fmt: skip
        given = difference.geometry or {}
        for name, value in geometry(states).items():
            if given.get(name) != value:
                raise PlanError("the states differ from the recorder's", tensor=name, expected=given.get(name),
                                got=value)  # fmt: skip
    elif (got := checksum(states)) != difference.base:
        raise PlanError("the difference does not follow these states: apply all of them in order, each once, and "
                        "change the states by differences alone", step=difference.step, tensor="base",
                        expected=difference.base, got=got)  # fmt: skip


def _step(states: RequestStates, arrays: Arrays) -> tuple[Plan, BlockOps]:
    """Return the plan, which the backend checks, and the block operations."""
    rows = arrays.int32("plan.rows", high=states.max_num_reqs - 1)
    counts = arrays.int32("plan.counts", count=len(rows))
    cancelled = arrays.read("plan.cancelled", high=1, count=len(rows)).astype(np.bool_)
    num = arrays.int32("drafts.counts", high=states.max_num_draft_tokens, count=len(rows))
    ids = arrays.int32("drafts.ids", -1, states.vocab_size - 1, int(num.sum()))
    plan = rows, counts, RaggedDrafts(num, ids) if len(ids) else None, cancelled if cancelled.any() else None
    return plan, BlockOps(arrays.int32("ops.zero"), arrays.pairs("ops.copies"))


def _write(states: RequestStates, arrays: Arrays, planned: I32) -> None:
    """Write the blocks, columns and tokens."""
    M, tables = states.max_model_len, states.block_tables
    for g, table in enumerate(tables):
        at = arrays.read(f"entries.{g}.at", high=table.table.size - 1)
        blocks = arrays.int32(f"entries.{g}.blocks", -1, count=len(at))
        check_block_ids(None, f"entries.{g}.blocks", blocks, table)
        table.table.reshape(-1)[at] = blocks
    before, resent = states.num_tokens.copy(), np.zeros_like(states.num_tokens)
    found = columns(states) | {"resent": (resent, M)}
    sets: dict[str, AnyArray] = {"0": planned}
    for name in list(arrays.unread):
        kind, _, k = name.rpartition(".")
        if kind == "rows":
            sets[k] = arrays.read(name, high=states.max_num_reqs - 1)
        elif kind == "mrope_positions":
            _stage_mrope(states, k, arrays.unread.pop(name))
        elif kind in found and k in sets:
            rows, (column, highest) = sets[k], found[kind]
            values = column[rows] + arrays.read(name, INT64_MIN, INT64_MAX, len(rows))
            if highest is not None:
                check_range(name, values, 0, highest)
            column[rows] = values
            if kind in COLUMNS:
                make(states.sampling._renewed(rows))
    ids = tables[0].ids.next
    ids[0] = max(ids[0], *(table.content_id.max() + 1 for table in tables))
    start, tokens = before - resent, arrays.read("tokens", high=states.vocab_size - 1)
    check_range("resent", start, 0, M)
    if (count := int(np.maximum(states.num_tokens - start, 0).sum())) != len(tokens):
        raise malformed("tokens", expected=count, got=len(tokens))
    states.token_ids[spans(start, states.num_tokens)] = tokens
    changed = np.flatnonzero((states.num_tokens != before) | (resent > 0))
    known = states.num_tokens[changed]
    last = states.token_ids[changed, np.maximum(known, 1) - 1]
    states.last_sampled_token[changed] = np.where(known > states.prompt_len[changed], last, -1)


def _stage_mrope(states: RequestStates, row: str, positions: AnyArray) -> None:
    ok = row.isdecimal() and len(row) < 10 and int(row) < states.max_num_reqs and states.live[int(row)]
    if not ok or positions.ndim != 2 or positions.dtype.kind not in "iu":
        raise malformed(f"mrope_positions.{row}", expected="a live row: integers [dims, tokens]", got=positions.shape)
    states.extras.stage_mrope(int(row), np.array(positions, np.int32))
