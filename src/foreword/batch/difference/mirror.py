"""The states as two processes have them: the columns that differences carry, and the changes of rows, made alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Ints
from foreword.batch.difference.arrays import Arrays
from foreword.batch.difference.encoding import malformed
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.batch.step.slots import ragged_arange
from foreword.batch.values.kv_groups import ContextParallel, KVGroup
from foreword.batch.values.parameters import Need
from foreword.batch.values.requests import NewRequests
from foreword.integers import INT32_MAX


def columns(states: RequestStates) -> dict[str, tuple[AnyArray, int | None]]:
    """Return the columns [R] that differences carry, floats as their bits, each with its largest value, the smallest
    being 0;
    None: every value of its type. The other columns follow from these and from the admissions.
    """
    M, sampling = states.max_model_len, states.sampling
    found: dict[str, tuple[AnyArray, int | None]] = {
        "num_tokens": (states.num_tokens, M),
        "num_computed_tokens": (states.num_computed_tokens, M),
        "num_placeholders": (states.num_placeholders, 2 * M + 1),
        "num_accepted_tokens": (states.num_accepted_tokens, 2 * M + 1),
        "prefill_len": (states.prefill_len, M),
        "rope_delta": (states.rope_delta, None),
        "encoder_len": (states.encoder_len, INT32_MAX),
        "row_generation": (states.row_generation, 2**62),
        "is_set": (sampling.is_set.view(np.int8), 1),
    }
    for g, table in enumerate(states.block_tables):
        found[f"num_blocks.{g}"] = table.num_blocks, table.width
        found[f"content_id.{g}"] = table.content_id, 2**62
    for name in COLUMNS:
        column: AnyArray = getattr(sampling, name)
        found[name] = column.view(f"i{column.itemsize}"), 2 * max(Need) - 1 if name == "needs" else None
    return found


def checksum(states: RequestStates) -> int:
    """Return the CRC-32 of all columns."""
    found = 0
    for column, _ in columns(states).values():
        found = zlib.crc32(column.data, found)
    return found


_SIZES = ("max_num_reqs", "max_model_len", "vocab_size", "max_num_draft_tokens", "null_block")


def geometry(states: RequestStates) -> dict[str, Any]:
    """Return what both sides must have in common. The rank of a context-parallel group may differ."""
    cp, groups = states.context_parallel, [table.group for table in states.block_tables]
    return {name: getattr(states, name) for name in _SIZES} | {
        "context_parallel": None if cp is None else [cp.size, cp.interleave],
        "kv_groups": [[g.block_size, g.sliding_window, g.context_parallel, g.recurrent] for g in groups],
    }


def states_of(geometry: Mapping[str, Any], *, rank: int = 0) -> RequestStates:
    """Return new states for the snapshot with this geometry. ``rank`` is that of a context-parallel group."""
    cp = geometry["context_parallel"]
    return RequestStates(
        kv_groups=[KVGroup(size, None, *rest) for size, *rest in geometry["kv_groups"]],
        context_parallel=None if cp is None else ContextParallel(cp[0], rank, cp[1]),
        **{name: geometry[name] for name in _SIZES},
    )


def mirror_of(states: RequestStates) -> RequestStates:
    """Return new states of the same shape."""
    groups, sizes = [table.group for table in states.block_tables], {name: getattr(states, name) for name in _SIZES}
    return RequestStates(kv_groups=groups, context_parallel=states.context_parallel, **sizes)


def remove(states: RequestStates, rows: I32) -> None:
    """Free rows. Afterwards they are equal wherever this is done, also where backends of the states differ."""
    if len(rows):
        states.remove_rows(rows)
        states.rope_delta[rows] = states.encoder_len[rows] = 0
        for table in states.block_tables:
            table.content_id[rows] = 0


def admit(states: RequestStates, arrays: Arrays, req_ids: Sequence[str], extras: Sequence[Mapping[str, Any]]) -> None:
    """Admit requests to the rows of the arrays; extras: as in `StepDifference`.

    Raise PlanError for rows that are not free; other errors as in `RequestStates.add_requests`.
    """
    count, groups = len(req_ids), range(len(states.block_tables))
    if not count:
        return
    rows = arrays.read("admitted.rows", high=states.max_num_reqs - 1, count=count).tolist()
    lora_id = arrays.int32("admitted.lora_id", count=count)
    new = NewRequests(
        req_ids=req_ids,
        token_ids=arrays.int32("admitted.token_ids"),
        num_tokens=arrays.int32("admitted.num_tokens", count=count),
        block_ids=[arrays.int32(f"admitted.block_ids.{g}", -1) for g in groups],
        num_blocks=[arrays.int32(f"admitted.num_blocks.{g}", count=count) for g in groups],
        prompt_len=arrays.int32("admitted.prompt_len", count=count),
        num_computed_tokens=arrays.int32("admitted.num_computed_tokens", count=count),
        lora_id=lora_id if lora_id.any() else None,
    )
    free, wanted = states._directory.free, set(rows)
    order = [row for row in free if row not in wanted] + rows[::-1]  # taken from the end
    if len(order) != len(free):
        raise malformed("admitted.rows", expected="free rows, each once", got=rows)
    free[:] = order
    if set().union(*extras) <= {"sampling_params"}:  # without what `add_requests` does not take
        states.add_requests(new)
        params = ((row, given["sampling_params"]) for row, given in zip(rows, extras, strict=False) if given)
        states.sampling.params.update(params)
    else:
        for request, given in zip(new.split(), extras, strict=True):
            states.add_request(replace(request, **given))
    for table in states.block_tables:
        table.content_id[rows] = 0


def spans(start: Ints, end: Ints) -> tuple[I64, I64]:
    """Return row and position of the entries start[row] … end[row] − 1 of all rows, row by row."""
    count = np.maximum(end - start, 0)
    return np.repeat(np.arange(len(count)), count), np.repeat(start, count) + ragged_arange(count)
