"""The tensors of a followed step against those that an engine's runner made, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.arrays import I64, AnyArray, Bools
from foreword.batch import (
    BatchTensors,
    GroupUse,
    InputBatch,
    discard_mask,
    entry_owners,
    is_token_ids,
    lora_mapping,
    mrope_positions,
    prompt_embeds,
)
from foreword.batch.step.layout import EXTENTS, FIELDS, Scalars
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.errors import PlanError

SCALARS = ("num_reqs", "num_tokens", "max_query_len", "max_seq_len")
SAMPLING = {f"sampling.{row.column.name or row.name}": row.column.name or row.name for row in PARAMETERS if row.column}
"""The names of sampling parameters, and their columns in `SamplingColumns`."""

# Rows of the follower, which are not those of the engine, and what only this library has.
_OWN = {"scalars", "idx_mapping", "expanded_idx_mapping", "row_generation", "num_placeholders", "num_blocks"}
_FEATURES: Mapping[str, Callable[[InputBatch], Any]] = {
    "discard_mask": discard_mask,
    "lora_requests": lambda batch: lora_mapping(batch).requests,
    "lora_tokens": lambda batch: lora_mapping(batch).tokens,
    "lora_logits": lambda batch: lora_mapping(batch).logits,
    "is_token_ids": is_token_ids,
}
_VECTORS = {"mrope_positions", "prompt_embeds"}  # each token has one value per dimension
PER_GROUP = frozenset({"slot_mapping", "block_table", "read_slots"})
"""The tensors that there are per KV group."""
NAMES = frozenset(
    {"req_ids", "read_slots", *SCALARS, *SAMPLING, *_FEATURES, *_VECTORS}
    | {name for name, view in vars(BatchTensors).items() if name in FIELDS and name not in _OWN}
)
"""The tensors that can be compared."""

_INDEPENDENT = {
    name: FIELDS[name].shape[0].replace("p", "")
    for name in (
        "num_scheduled_tokens", "num_draft_tokens", "num_computed_tokens", "is_prefilling", "seq_lens", "positions",
        "input_ids", "slot_mapping", "draft_token_ids", "block_table", "discard_mask", "lora_requests", "lora_tokens",
    )
}  # fmt: skip
"""The tensors whose values for a request do not depend on the others, and their first axis."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The entries of a tensor that differ for one request of the batch, None where they belong to none."""

    index: tuple[int, ...]
    request: int | None
    expected: object
    got: object
    count: int


@dataclass(frozen=True, slots=True)
class TableRule:
    """The entries of a block table that must be as the scheduler said.

    below_window: also those below the window or chunk, which no kernel reads. past_end: entries past a request's
    blocks must be null.
    """

    below_window: bool = False
    past_end: bool = False


def on_host(value: object) -> bool:
    """Return whether reading the value copies nothing from a device."""
    if isinstance(value, list | tuple):
        return all(map(on_host, value))
    return value is None or isinstance(value, np.ndarray | np.generic | int | str)


def differences(batch: InputBatch, name: str, got: object) -> list[Difference]:
    """Return the requests for which a tensor differs, of one that there is once.

    Raise PlanError for an unknown name.
    """
    if name in SCALARS:
        return _whole(int(getattr(batch, name)), got)
    if name in SAMPLING:
        column: AnyArray = getattr(batch.states.sampling, SAMPLING[name])
        return compared(batch, "B", column[batch.idx_mapping], got, None)
    if name in _VECTORS:
        return _vector_differences(batch, name, np.asanyarray(got))
    if name in _FEATURES:
        expected = _FEATURES[name](batch)
    elif name in NAMES:
        expected = getattr(batch, name)
    else:
        raise PlanError("no tensor of this name can be compared", tensor=name, expected=f"one of {sorted(NAMES)}")
    field = FIELDS[name]
    return compared(batch, field.shape[0], expected, got, batch.num_tokens if field.padding == "T" else field.padding)


def _vector_differences(batch: InputBatch, name: str, got: AnyArray) -> list[Difference]:
    """Return the requests whose rotary positions [dims, T], or prompt embeddings in inputs [T, hidden], differ."""
    if name == "mrope_positions":
        dims, T = len(got), batch.num_tokens
        return compared(batch, "T", mrope_positions(batch, dims)[:, :T].T, got[:, :T].T, None)
    rows, vectors = prompt_embeds(batch, got.shape[-1])
    wrong = np.zeros(got.shape, np.bool_)
    wrong[rows] = got[rows] != vectors.astype(got.dtype)
    if not wrong.any():
        return []
    expected = got.copy()
    expected[rows] = vectors
    return of_requests(entry_owners(batch, "T", len(got)), wrong, expected, got)


def compared(batch: InputBatch, axis: str, expected: AnyArray, got: object, padding: Any) -> list[Difference]:
    """Return the requests for which an array differs. Entries of ``got`` past the step's must be padding."""
    theirs = np.asanyarray(got)
    live = batch.scalars[Scalars._fields.index(EXTENTS[axis.replace("p", "")].scalar)] + EXTENTS[axis].extra
    ours = expected[:live]
    if "p" in axis and theirs.ndim == 1 and len(theirs) > live:
        ours = np.full(len(theirs), padding, expected.dtype)
        ours[:live] = expected[:live]
    if ours.shape != theirs.shape:
        return _whole(f"shape {ours.shape}", f"shape {theirs.shape}")
    wrong: Bools = ours != theirs
    if not wrong.any():
        return []
    wrong = np.ma.filled(wrong, False)
    return of_requests(entry_owners(batch, axis, len(ours)), wrong, ours, theirs)


def of_requests(owner: I64, wrong: Bools, expected: AnyArray, got: AnyArray) -> list[Difference]:
    """Return the wrong entries, by the request that owns their first axis."""
    at = np.argwhere(wrong)
    requests, first, counts = np.unique(owner[at[:, 0]], return_index=True, return_counts=True)
    out = []
    for request, i, count in zip(requests.tolist(), first.tolist(), counts.tolist(), strict=True):
        index = tuple(at[i].tolist())
        values = expected[index].item(), got[index].item()
        out.append(Difference(index, None if request < 0 else request, *values, count))
    return out


def slot_differences(batch: InputBatch, g: int, use: GroupUse, got: object) -> list[Difference]:
    """Return the requests whose slots in a KV group differ."""
    return compared(batch, "Tp", use.slots_of(batch, g), got, FIELDS["slot_mapping"].padding)


def read_differences(batch: InputBatch, g: int, use: GroupUse, got: object) -> list[Difference]:
    """Return the requests that read other slots of a KV group, of slots [keys], request by request."""
    owner, expected = use.read_slots_of(batch, g)
    theirs = np.asanyarray(got)
    if theirs.shape != expected.shape:
        return _whole(f"shape {expected.shape}", f"shape {theirs.shape}")
    wrong = np.ma.filled(theirs != expected, False)
    return of_requests(owner, wrong, expected, theirs) if wrong.any() else []


def table_differences(batch: InputBatch, g: int, use: GroupUse, rule: TableRule, got: object) -> list[Difference]:
    """Return the requests whose blocks in a KV group differ from those that the scheduler gave.

    The width of the table, and what stands past a request's blocks, is the engine's own.
    """
    theirs, states, rows, B = np.asanyarray(got), batch.states, batch.idx_mapping, batch.num_reqs
    if theirs.ndim != 2 or len(theirs) < B:
        return _whole(f"shape ({B}, …)", f"shape {theirs.shape}")
    table, null = states.block_tables[g], states.null_block
    held, width = table.num_blocks[rows], int(theirs.shape[1])
    ring = use.ring is not None
    needed = held if not ring else np.minimum(held, -(-(use.ring or 1) // table.group.block_size))
    most = min(int(needed.max(initial=0)), width)
    entries = np.arange(most)
    told, given = table.table[rows, :most], theirs[:B, :most]
    checked = entries < needed[:, None]
    if not (rule.below_window or ring):
        checked &= entries >= (use.lowest(table, batch.num_computed_tokens) // table.tokens_per_block)[:, None]
    wrong = checked & (told != given)
    found = of_requests(np.arange(B), np.ma.filled(wrong, False), told, given) if wrong.any() else []
    need = -(-batch.seq_lens[:B] // table.tokens_per_block)
    if not ring and int(need.max(initial=0)) > width:
        b = int(np.argmax(need))
        found.append(Difference((b,), b, f"{int(need[b])} entries or more", f"{width} entries", 1))
    if rule.past_end:
        past = (np.arange(width) >= needed[:, None]) & (theirs[:B] != null)
        if past.any():
            nulls = np.broadcast_to(np.int64(null), past.shape)
            found += of_requests(np.arange(B), past, nulls, theirs[:B])
    return found


def kept_entries(
    planned: Mapping[str, int], drafts: Mapping[str, Sequence[int]], left_out: Collection[str]
) -> dict[str, Bools]:
    """Return, by axis, the entries of a step's tensors that are not those of the requests left out."""
    kept = np.array([rid not in left_out for rid in planned], np.bool_)
    counts = np.maximum(list(planned.values()), 0)
    k = np.array([len(drafts.get(rid, ())) for rid in planned], np.int64)
    return {"B": kept, "T": np.repeat(kept, counts), "D": np.repeat(kept, k)}


def selected(tensors: Mapping[str, Any], kept: Mapping[str, Bools]) -> dict[str, Any]:
    """Return these entries of the tensors whose values do not depend on the other requests of the batch."""
    out = {}
    for name, got in tensors.items():
        axis = "B" if name in SAMPLING else _INDEPENDENT.get(name, "")
        if axis not in kept or got is None:
            continue
        parts = list(got) if name in PER_GROUP else [got]
        cut = [None if part is None else np.asanyarray(part)[: len(kept[axis])] for part in parts]
        if any(part is not None and len(part) < len(kept[axis]) for part in cut):
            continue
        cut = [None if part is None else part[kept[axis]] for part in cut]
        out[name] = cut if name in PER_GROUP else cut[0]
    return out


def _whole(expected: object, got: object) -> list[Difference]:
    return [] if expected == got else [Difference((), None, expected, got, 1)]
