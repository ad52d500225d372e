"""The form of a row of the table of sampling parameters. The rows are the fields of `SamplingParams`.

`foreword.batch.values.sampling_params.PARAMETERS` lists them. What needs a fact of a parameter loops over it: the
conversions, checks and messages of `SamplingParams`, the columns of the states and their flags, the specification, the
command line, the bodies of requests, docs/sampling-parameters.md, and, held by a test, the arrays of native code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from itertools import islice
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from foreword.batch.values.structured_outputs import structured_outputs

T = TypeVar("T")

_POWERS: dict[float, str] = {2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
"""Limits that are shown as powers."""

MAX_ITEMS = 1 << 20  # of a list: more than any vocabulary has


class Need(IntFlag):
    """What the sampling of a row needs, so that a step can skip what none of its rows needs."""

    GREEDY = 1  # temperature 0
    RANDOM = 2
    TOP_P = 4
    TOP_K = 8
    MIN_P = 16
    PENALTIES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    MIN_TOKENS = 256
    LOGIT_BIAS = 512
    BAD_WORDS = 1024
    ALLOWED_TOKENS = 2048
    STRUCTURED_OUTPUT = 4096
    TYPICAL_P = 8192
    TOP_N_SIGMA = 16384
    XTC = 32768
    DRY = 65536


RARE = Need.MIN_TOKENS | Need.LOGIT_BIAS | Need.BAD_WORDS | Need.ALLOWED_TOKENS | Need.STRUCTURED_OUTPUT | Need.DRY
"""The flags of rows whose parameters object is read, because no column holds all that they need."""

CHANGING = Need.ALLOWED_TOKENS | Need.LOGIT_BIAS | Need.MIN_TOKENS | Need.PENALTIES | Need.DRY | Need.BAD_WORDS
"""The flags of rows whose logits are changed by their own rules before the draw."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    "<": operator.lt,
    "!=": operator.ne,
    "not >": lambda x, y: ~(x > y),  # true of NaN
}


class Column(NamedTuple):
    """The array [R] that holds a parameter for every state row.

    dtype: of the array. need: the flag of the rows whose sampling reads it. sets_need: a row has the flag where its
    value compares so with ``neutral`` (a key of `COMPARISONS`); None: the flag follows from another column.
    neutral: the value of a row without parameters. name: of the array; "": the parameter's.
    """

    dtype: type[np.generic]
    need: Need
    sets_need: str | None
    neutral: float
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A row of the table.

    type: the annotation of the field, without None; a key of `KINDS`. nullable: whether None is a value.
    help: one sentence or two, for users. fix: what the error of another value recommends; "": what its kind does.
    least, above, most: the limits of a number; ``above`` is excluded. An integer without ``most`` is not limited.
    need: the flag of rows for which a value is given, of a parameter without a column.
    """

    name: str
    type: str
    nullable: bool
    default: object
    help: str
    fix: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    need: Need | None = None
    column: Column | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.type]

    @property
    def limits(self) -> str:
        """The limits of a number in words, such as "in [0, 100]" or "1 or more"; "" without limits."""
        low = self.least if self.above is None else self.above
        if low is None:
            return ""
        if self.type == "float":
            return f"in {'[' if self.above is None else '('}{low:g}, {self.most:g}]"
        most = "" if self.most is None else f", and at most {_POWERS.get(self.most, self.most)}"
        return f"{_POWERS.get(low, low)} or more{most}"

    def refusal(self, value: Any) -> str | None:
        """Why the value, as converted, is not accepted; None if it is."""
        if value is None and self.nullable:
            return None
        if not self.kind.accepts(value):
            return f"expected {self.kind.name}" + " or None" * self.nullable
        is_inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )
        return None if is_inside else f"must be {self.limits}"


def parameter(
    default: T,
    help: str,
    *,
    fix: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    need: Need | None = None,
    column: Column | None = None,
) -> T:
    """Return a field of `SamplingParams` that holds a row of the table; see `Parameter`."""
    facts = {"help": help, "fix": fix, "least": least, "above": above, "most": most, "need": need, "column": column}
    made: T = field(default=default, metadata=facts)
    return made


class Kind(NamedTuple):
    """The values of one type: what makes them of what was given, as far as possible, and what tells them apart."""

    name: str
    convert: Callable[[Any], Any]
    accepts: Callable[[Any], bool]
    fix: str = "Correct it, or leave it out."


def is_integer(value: object) -> bool:  # isinstance of an abstract class is slow
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> bool:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def _are_texts(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(item, str) and item != "" for item in cast(Sequence[object], value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _integer(value: Any) -> Any:
    """``value.__index__()``, or the value itself without one."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except MemoryError:
        raise
    except Exception:
        return value


def _float(value: Any) -> Any:
    """``value.__float__()``, or the value itself without one, and of a flag."""
    if isinstance(value, bool | np.bool_) or not hasattr(type(value), "__float__"):
        return value
    try:
        return float(value)
    except MemoryError:
        raise
    except Exception:
        return value


def _flag(value: Any) -> Any:
    return bool(value) if isinstance(value, np.bool_) else value


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what makes a tuple of converted values, and returns a value that is not a finite list as it is."""

    def convert_all(values: Any) -> Any:
        if isinstance(values, Mapping | bytes | bytearray):
            return values
        try:
            found = tuple(map(convert, islice(values, MAX_ITEMS + 1)))
        except MemoryError:
            raise
        except Exception:
            return values
        return found if len(found) <= MAX_ITEMS else values

    return convert_all


def _biases(values: Any) -> Any:
    return {_integer(token): _float(bias) for token, bias in values.items()} if isinstance(values, Mapping) else values


def _arguments(values: Any) -> Any:
    return dict(values) if isinstance(values, Mapping) else values


def _are_arguments(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _anything(value: object) -> bool:
    return True


_texts, _ids = _each(lambda value: value), _each(_integer)
_TEXTS = "a list of strings, none of them empty"

KINDS: dict[str, Kind] = {
    "int": Kind("an integer", _integer, is_integer),
    "float": Kind("a number", _float, is_number),
    "bool": Kind("a bool", _flag, lambda value: type(value) is bool, "Give True or False."),
    "str | Sequence[str]": Kind(f"a string or {_TEXTS}", _texts, lambda value: _is_text(value) or _are_texts(value)),
    "Sequence[str]": Kind(_TEXTS, _texts, _are_texts, "Give a list."),
    "str | int": Kind(
        "a text that is not empty, or a token id", _integer, lambda value: _is_text(value) or is_integer(value)
    ),
    # Token ids are accepted when the size of the vocabulary is known, structured outputs by their own converter.
    "Sequence[int]": Kind("a list of token ids", _ids, _anything),
    "Sequence[Sequence[int]]": Kind("a list of lists of token ids", _each(_ids), _anything),
    "Mapping[int, float]": Kind("a mapping from token ids to numbers", _biases, _anything),
    "Mapping[str, object]": Kind("a mapping from names to values", _arguments, _are_arguments),
    "object": Kind("a mapping", structured_outputs, _anything),
}
"""Annotation, without None → the values."""
