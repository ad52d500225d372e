"""Sampling parameters of the live requests: one array per parameter, by state row.

`COLUMNS` and `FLAG_RULES` are made from the table of parameters, and are data for this module and for native code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import setitem
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I32, I64, AnyArray, Ints
from foreword.batch.state.changes import Change, make
from foreword.batch.values.parameters import COMPARISONS, Need
from foreword.batch.values.sampling_params import PARAMETERS, SamplingParams
from foreword.seeds import derived_seed


class FlagRule(NamedTuple):
    """A row has ``flag`` if the comparison of its stored value of ``column`` with ``operand`` is true."""

    flag: int
    column: str
    comparison: str  # a key of COMPARISONS
    operand: float


GIVEN = {column.name: column for row in PARAMETERS if (column := row.column) is not None}
"""The columns whose values requests give, by name."""

COLUMNS: dict[str, tuple[Any, float]] = {
    **{name: (column.dtype, np.array(column.neutral, column.dtype).item()) for name, column in GIVEN.items()},
    "needs": (np.int32, int(Need.GREEDY)),  # computed from the other columns
}
"""Column → its dtype, and the value of a row without parameters. Such a row is greedy, unlike a request with default
parameters."""

FLAG_RULES = (
    FlagRule(int(Need.GREEDY), "temperature", "not >", 0),
    *(FlagRule(int(c.need), name, c.sets_need, c.neutral) for name, c in GIVEN.items() if c.sets_need is not None),
)
_COMPILED_RULES = tuple((rule.flag, rule.column, COMPARISONS[rule.comparison], rule.operand) for rule in FLAG_RULES)
_COMPUTED = ("top_k", "seed", "num_logprobs", "num_prompt_logprobs")
_AS_GIVEN = tuple(name for name in GIVEN if name not in _COMPUTED)
_FLAGS_OF_PARAMS = tuple((row.name, int(row.need)) for row in PARAMETERS if row.need is not None and not row.column)


VERSION, BASE_SEED, NUM_ADMISSIONS = range(3)  # the entries of `SamplingColumns.counters`


class SamplingColumns:
    """One array per parameter, [R], by state row. ``num_logprobs`` is −1 if none are requested and V if all are.

    needs: int32 [R], the `Need` flags of each row. params: row → the request's parameters object, for parameters
    without a column; a row that was filled from columns has none. stamp: int64 [R], renewed by every change of a row.
    counters: int64 [3], which native code increments, too. version: grows with every change, so that a result made from
    the columns can be checked for validity. base_seed, num_admissions: a request without a seed gets one that is
    derived from ``base_seed`` and the number of its admission, so that such requests draw independently.
    """

    __slots__ = (*COLUMNS, "_blocks", "core", "counters", "is_set", "params", "stamp")

    temperature: F32
    seed: I64
    num_logprobs: I32
    num_prompt_logprobs: I32
    needs: I32

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> AnyArray:
            """Return any other column of `COLUMNS`."""

    def __init__(self, max_num_reqs: int, base_seed: int = 0) -> None:
        # Columns of one type are rows of one array, so that resetting a request is one assignment per type.
        self._blocks: list[tuple[AnyArray, AnyArray]] = []
        for dtype in dict.fromkeys(dtype for dtype, _ in COLUMNS.values()):
            names = [name for name, column in COLUMNS.items() if column[0] is dtype]
            defaults = np.array([[COLUMNS[name][1]] for name in names], dtype)
            block = np.repeat(defaults, max_num_reqs, axis=1)
            self._blocks.append((block, defaults))
            for name, column in zip(names, block, strict=True):
                setattr(self, name, column)
        self.is_set = np.zeros(max_num_reqs, np.bool_)  # rows that may differ from the defaults
        self.stamp = np.zeros(max_num_reqs, np.int64)
        self.params: dict[int, SamplingParams] = {}
        self.core: Any = None  # the native core over these arrays, if it is built
        self.counters: I64 = np.array([0, base_seed, 0], np.int64)

    @property
    def version(self) -> int:
        return int(self.counters[VERSION])

    @property
    def base_seed(self) -> int:
        return int(self.counters[BASE_SEED])

    @base_seed.setter
    def base_seed(self, seed: int) -> None:
        self.counters[BASE_SEED] = seed

    @property
    def num_admissions(self) -> int:
        return int(self.counters[NUM_ADMISSIONS])

    @num_admissions.setter
    def num_admissions(self, count: int) -> None:
        self.counters[NUM_ADMISSIONS] = count

    @property
    def by_name(self) -> dict[str, AnyArray]:
        """Return every column by its name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def native_layout(self) -> dict[str, Any]:
        """Return the arrays, their defaults and the flag rules in the form of native code."""
        return {
            "columns": {name: (getattr(self, name), default) for name, (_, default) in COLUMNS.items()},
            "flag_rules": [tuple(rule) for rule in FLAG_RULES],
            "stamp": self.stamp,
            "is_set": self.is_set,
            "counters": self.counters,
            "params": self.params,
        }

    def set(self, row: int, params: SamplingParams, vocab_size: int, admission: int) -> list[Change]:
        """Return the changes that write the parameters of a request, with the number of its admission, to its row."""
        given = {name: getattr(params, name) for name in _AS_GIVEN} | {
            "top_k": params.top_k if 0 < params.top_k < vocab_size else 0,
            "seed": derived_seed(self.base_seed, admission) if params.seed is None else params.seed,
            "num_logprobs": _count(params.logprobs, vocab_size),
            "num_prompt_logprobs": _count(params.prompt_logprobs, vocab_size),
        }
        return [*self._write(row, given, flags_from_params(params)), (setitem, self.params, row, params)]

    def set_given(self, row: int, given: Mapping[str, Any], admission: int) -> list[Change]:
        """Return the changes that write named values of a request. If it samples at random without a seed, one is
        derived.
        """
        if "temperature" in given and "seed" not in given:
            given = {**given, "seed": derived_seed(self.base_seed, admission)}
        return self._write(row, given, 0)

    def _write(self, row: int, given: Mapping[str, Any], rare: int) -> list[Change]:
        values = {name: dtype(given.get(name, default)) for name, (dtype, default) in COLUMNS.items()}
        values["needs"] = self.flags(values.__getitem__) | rare
        return [
            *((setitem, getattr(self, name), row, value) for name, value in values.items()),
            (setitem, self.is_set, row, True),
            *self._renewed(row),
        ]

    def reset(self, rows: Ints) -> list[Change]:
        """Return the changes that write the defaults (greedy, nothing else) to these rows."""
        rows = rows[self.is_set[rows]]
        if not len(rows):
            return []
        return [
            *((setitem, block, (slice(None), rows), defaults) for block, defaults in self._blocks),
            (setitem, self.is_set, rows, False),
            *((self.params.pop, row, None) for row in rows.tolist()),
            *self._renewed(rows),
        ]

    def _renewed(self, rows: Any) -> list[Change]:
        version = self.version + 1
        return [(setitem, self.stamp, rows, version), (setitem, self.counters, VERSION, version)]

    def set_columns(self, rows: I32, columns: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Set column[rows] = values for each named column, and update the flags of these rows."""
        for name, values in columns.items():
            getattr(self, name)[rows] = values
        if self.core is not None:
            self.core.renew_sampling(np.ascontiguousarray(rows, np.int32))
            return
        self.is_set[rows] = True
        self.needs[rows] = self.flags(lambda name: getattr(self, name)[rows])
        make(self._renewed(rows))

    def exchange(self, a: int, b: int) -> None:
        """Swap the parameters objects of two rows, whose arrays the caller swaps."""
        held = self.params
        values = held.pop(a, None), held.pop(b, None)
        for row, value in zip((b, a), values, strict=True):
            if value is not None:
                held[row] = value
        # Rows set in one call share a stamp; after a move each gets its own.
        for row in (a, b):
            make(self._renewed(row))

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        return [self.is_set, *(getattr(self, name) for name in COLUMNS)]

    def flags(self, values: Callable[[str], Any]) -> Any:
        """Return the flags of rows with these values by column, by `FLAG_RULES`."""
        needs: Any = 0
        for flag, name, compare, operand in _COMPILED_RULES:
            needs = needs | compare(values(name), operand) * flag
        return needs


def flags_from_params(params: SamplingParams) -> int:
    """Return the `Need` flags of parameters without a column: each given parameter has its own flag."""
    return sum(flag for name, flag in _FLAGS_OF_PARAMS if getattr(params, name))


def _count(wanted: int | None, vocab_size: int) -> int:
    """Return num_logprobs as it is stored: −1 for None, V for −1 (all)."""
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else min(wanted, vocab_size)
