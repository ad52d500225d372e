"""Compare a tensor of a trace with that of the replay."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.arrays import AnyArray, Bools
from foreword.batch import GroupUse, InputBatch, entry_owners
from foreword.trace.tensors import NAMED, TraceTensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry that differs in one tensor of one step. line: 0 for an event that is not from a file."""

    line: int
    step: int
    tensor: str
    index: tuple[int, ...]
    request: str | None
    expected: object
    got: object

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        owner = f" (request {self.request!r})" if self.request is not None else ""
        values = (value if isinstance(value, str) else reprlib.repr(value) for value in (self.expected, self.got))
        expected, got = (f"{text:.80}" for text in values)
        line = f"line {self.line}, " if self.line else ""
        return f"{line}step {self.step}: {self.tensor}{where}{owner}: expected {expected}, got {got}"


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that differs."""

    index: tuple[int, ...]
    expected: object
    got: object


def first_difference(batch: InputBatch, name: str, theirs: Any, *, line: int = 0, step: int = 0) -> Difference | None:
    """Return the first entry of a tensor of a trace that differs from the step's; None if all are equal.

    Padding may be absent, shorter or longer than in the step; what is present must be padding. Entries of block tables
    below the sliding window may have any value. If a group's tensor is None, the engine has no such tensor.
    """
    if name == "req_ids":
        found = _of_names(list(batch.req_ids), theirs)
        return None if found is None else Difference(line, step, name, found.index, None, found.expected, found.got)
    tensor = NAMED.get(name)
    if tensor is None:
        found = Found((), "the name of a tensor (docs/conformance.md)", "an unknown name")
        return Difference(line, step, name, (), None, found.expected, found.got)
    found = _found(batch, tensor, theirs)
    if found is None:
        return None
    owner = _owner(batch, tensor, found.index[tensor.per_group :])
    return Difference(line, step, name, found.index, owner, found.expected, found.got)


def _found(batch: InputBatch, tensor: TraceTensor, theirs: Any) -> Found | None:
    ours = tensor.read(batch)
    if ours is None:
        return Found((), f"no such tensor without {tensor.optional} in the first line", theirs)
    if not isinstance(ours, list):
        return _of_array(batch, tensor, np.asarray(ours), theirs, None)
    if not isinstance(theirs, list | tuple):
        return Found((), "a list", theirs)
    if len(theirs) != len(ours):
        return Found((), f"{len(ours)} entries", f"{len(theirs)}")
    for group, (expected, got) in enumerate(zip(ours, theirs, strict=True)):
        if got is None:
            continue
        unread = _below_window(batch, group) if tensor.name == "block_table" else None
        found = _of_array(batch, tensor, expected, got, unread)
        if found is not None:
            return Found((group, *found.index), found.expected, found.got)
    return None


def _of_names(ours: list[str], theirs: Any) -> Found | None:
    if not isinstance(theirs, list | tuple):
        return Found((), "a list", theirs)
    if len(theirs) != len(ours):
        return Found((), f"{len(ours)} entries", f"{len(theirs)}")
    return next((Found((b,), a, t) for b, (a, t) in enumerate(zip(ours, theirs, strict=True)) if a != t), None)


def _of_array(
    batch: InputBatch, tensor: TraceTensor, ours: AnyArray, theirs: Any, unread: Bools | None
) -> Found | None:
    if ours.ndim == 0:
        return None if _equal(ours.item(), theirs) else Found((), ours.item(), theirs)
    if not isinstance(theirs, list | tuple | np.ndarray):
        return Found((), "a list", theirs)
    pad = {"T": batch.num_tokens, "null": batch.states.null_block}.get(str(tensor.padding), tensor.padding)
    fixed = _num_required(batch, tensor.shape[0])
    if (fixed is None and len(theirs) != len(ours)) or (fixed is not None and len(theirs) < fixed):
        return Found((), f"{len(ours)} entries", f"{len(theirs)}")
    wide = ours.shape if fixed is None else (max(len(ours), len(theirs)), *ours.shape[1:])
    if ours.ndim == 1:
        got = _numbers(theirs)
    else:
        rows = [_numbers(row) if isinstance(row, list | tuple | np.ndarray) else None for row in theirs]
        if (bad := next((b for b, row in enumerate(rows) if row is None), None)) is not None:
            return Found((bad,), "a list of numbers", theirs[bad])
        lengths = [len(row) for row in rows if row is not None]
        wide = wide[0], max(ours.shape[1], *lengths, 0)
        got = np.full((len(rows), wide[1]), pad, np.int64)
        for row, numbers in zip(got, rows, strict=True):
            if numbers is not None:
                row[: len(numbers)] = numbers
    if got is None:
        at = next((i for i, value in enumerate(theirs) if _numbers([value]) is None), None)
        if at is None:  # integers that do not fit in one array type
            at = next((i for i, value in enumerate(theirs) if i >= len(ours) or not _equal(ours[i].item(), value)), 0)
        return Found((at,), ours[at].item() if at < len(ours) else pad, theirs[at])
    expected, found = _widened(ours, wide, pad), _widened(got, wide, pad)
    wrong: Bools = expected != found
    if unread is not None:
        wrong[: unread.shape[0], : unread.shape[1]] &= ~unread
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    return Found(index, expected[index].item(), found[index].item())


def _equal(ours: object, theirs: Any) -> bool:
    return not isinstance(theirs, list | tuple) and bool(np.ndim(theirs) == 0 and ours == theirs)


def _numbers(values: Any) -> AnyArray | None:
    """Return a flat list of numbers or truth values as an array; None for anything else."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    if not array.size:
        return np.zeros(0, np.int64)
    return array if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _widened(values: AnyArray, shape: tuple[int, ...], pad: Any) -> AnyArray:
    """Return the values with entries of ``pad`` up to a shape."""
    if values.shape == shape:
        return values
    out = np.full(shape, 0 if pad is None else pad, values.dtype)
    out[tuple(slice(n) for n in values.shape)] = values
    return out


def _num_required(batch: InputBatch, axis: str) -> int | None:
    """Return how many entries of an axis must be present, without the padding; None: all of them."""
    return {"Tp": batch.num_tokens, "Bp": batch.num_reqs, "Bp+1": batch.num_reqs + 1}.get(axis)


def _below_window(batch: InputBatch, group: int) -> Bools:
    """Return [B, K], the entries of a block table that are below the sliding window, which no query reads."""
    table = batch.states.block_tables[group]
    first = GroupUse().lowest(table, batch.num_computed_tokens) // table.tokens_per_block
    return np.arange(table.width) < first[:, None]


def _owner(batch: InputBatch, tensor: TraceTensor, index: tuple[int, ...]) -> str | None:
    """Return the request that an entry belongs to, None for padding."""
    if not index or not tensor.shape:
        return None
    axis = int(tensor.shape[0] == "dims")  # a tensor with a value per dimension and token
    owner = int(entry_owners(batch, tensor.shape[axis], index[axis] + 1)[-1])
    return None if owner < 0 else batch.req_ids[owner]
