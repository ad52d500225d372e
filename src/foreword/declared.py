"""Declare values that users give by name: the common form of settings and sampling parameters.

    temperature: float = declared(1.0, "Divide the logits by this value.", least=0.0, most=100.0)

A field of a dataclass that is made in this way is a row of a table, which `declarations` returns. Checks, messages,
command lines, environment variables, configuration files, bodies of requests and pages are loops over such rows.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from itertools import islice
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from foreword.integers import attempt
from foreword.names import advice

T = TypeVar("T")
D = TypeVar("D", bound="Declared")

MAX_ITEMS = 1 << 20  # largest length of a list: more than the size of any vocabulary
_KEY = "declared"


class Kind(NamedTuple):
    """A kind of values.

    name: its name in messages. convert: converts a given value; a value that cannot be converted is returned unchanged.
    accepts: returns whether a converted value is of this kind. read: converts a text to a value, or to one of its
    items; ValueError or KeyError for a wrong text. form: the form of that text in help. collect: makes a value from its
    items, if it has items. fix: the advice for any other value.
    """

    name: str
    convert: Callable[[Any], Any]
    accepts: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    form: str = "TEXT"
    collect: Callable[[Iterable[Any]], Any] | None = None
    fix: str = "Correct it, or leave it out."
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A row of the table.

    name: the name of the field. type: its annotation without None, a key of `KINDS`, which has its ``kind``. optional:
    whether None is a value. help: one or two sentences for users. fix: the advice in the error for a wrong value; "":
    the advice of its kind, or the most similar choice. choices: the only valid texts, if the values are limited. least,
    above, most: the limits of a number; ``above`` is excluded. unit: with "bytes", texts such as "2GiB" are also valid;
    with "path", an os.PathLike. value_name: the name of the value in help. convert: converts the value instead of its
    kind, which then checks nothing; ValueError with the reason.
    """

    name: str = ""
    type: str = "str"
    optional: bool = False
    default: object = None
    help: str = ""
    fix: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    unit: str = ""
    value_name: str = ""
    convert: Callable[[Any], Any] | None = None
    is_shown: bool = True
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", KINDS[self.type])

    @property
    def form(self) -> str:
        """Return the name of the value in help."""
        return self.value_name or ("NAME" if self.choices else "SIZE" if self.unit == "bytes" else self.kind.form)

    @property
    def limits(self) -> str:
        """Return the limits of a number: "from 1 to 65536", "≥ 1", "> 0 and ≤ 1"; "" for other values."""
        if not self.kind.is_number or (self.least is None and self.above is None):
            return ""
        if self.above is None and self.most is not None:
            return f"from {_plain(self.least)} to {_plain(self.most)}"
        low = f"> {_plain(self.above)}" if self.least is None else f"≥ {_plain(self.least)}"
        return low if self.most is None else f"{low} and ≤ {_plain(self.most)}"

    @property
    def expected(self) -> str:
        """Describe the valid values: "an integer from 1 to 65536, or None"."""
        one = f"one of {', '.join(map(repr, self.choices))}" if self.choices else f"{self.kind.name} {self.limits}"
        return one.rstrip() + ', or a size such as "2GiB"' * (self.unit == "bytes") + ", or None" * self.optional

    def refusal(self, value: Any) -> str | None:
        """Return the reason why a converted value is not accepted; None if it is accepted."""
        if value is None and self.optional:
            return None
        kind = self.kind
        if not kind.accepts(value):
            return f"expected {self.expected}"
        if self.choices and value not in self.choices:
            return f"must be {self.expected}. {self.fix or advice(value, self.choices, '')}".rstrip()
        is_inside = not kind.is_number or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )
        return None if is_inside else f"must be {self.limits}"

    def text_of(self, value: object) -> str:
        """Return a value as users write it: "2GiB" for a number of bytes."""
        if self.unit == "bytes" and isinstance(value, int):
            for power, prefix in ((30, "G"), (20, "M"), (10, "K")):
                if value and value % (1 << power) == 0:
                    return f"{value >> power}{prefix}iB"
        return str(value)


def declared(default: T, help: str, *, is_shown: bool = True, **facts: Any) -> T:
    """Declare a field. is_shown: whether the ``repr`` of its owner, and messages, show it. facts: the facts of its row
    that do not follow from the annotation.
    """
    return field(default=default, repr=is_shown, metadata={_KEY: {"help": help, **facts}})


def declared_like(owner: Any, name: str) -> Any:
    """Declare a field like that of another class."""
    [like] = (item for item in fields(owner) if item.name == name)
    return field(default=like.default, metadata=like.metadata)


def declarations(owner: Any, form: type[D]) -> dict[str, D]:
    """Return the rows that a dataclass declares, by name, as values of a class of rows."""
    return {item.name: _row(owner, item, form) for item in fields(owner) if _KEY in item.metadata}


def _row(owner: Any, item: Field[Any], form: type[D]) -> D:
    annotation, facts = str(item.type), dict(item.metadata[_KEY])
    type, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    if type not in KINDS:  # choices, perhaps with a separate name, or a value that the row itself converts
        hint = get_type_hints(owner)[item.name]
        hint = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint
        type, facts["choices"] = "str", get_args(hint) if get_origin(hint) is Literal else ()
    return form(name=item.name, type=type, optional=optional, default=item.default, is_shown=item.repr, **facts)


def _plain(number: float | None) -> str:
    """Return a limit as text, large powers of two as such: "2^24", "2^31 - 1"."""
    for rest, less in (("", 0), (" - 1", 1)):
        power = int(abs(number or 0)) + less
        if power >= 2**20 and power & (power - 1) == 0:
            return f"{'-' * ((number or 0) < 0)}2^{power.bit_length() - 1}{rest}"
    return f"{number:g}" if isinstance(number, float) else str(number)


def _integer(value: Any) -> Any:
    """Return ``value.__index__()``. A flag, and a value without ``__index__``, is returned unchanged."""
    return value if type(value) is int or type(value) is bool else attempt(operator.index, value, otherwise=value)


def _float(value: Any) -> Any:
    """Return ``value.__float__()``. A flag, and a value without ``__float__``, is returned unchanged."""
    if isinstance(value, bool | np.bool_) or not hasattr(type(value), "__float__"):
        return value
    return attempt(float, value, otherwise=value)


def _same(value: Any) -> Any:
    return value


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that converts a finite list to a tuple of converted values, and returns any other value
    unchanged.
    """

    def convert_all(values: Any) -> Any:
        if isinstance(values, Mapping | str | bytes | bytearray):
            return values
        found = attempt(lambda given: tuple(islice(given, MAX_ITEMS + 1)), values, otherwise=None)
        return values if found is None or len(found) > MAX_ITEMS else tuple(map(convert, found))

    return convert_all


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of Python or NumPy, and no truth value."""
    # isinstance with an abstract class is slow.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> bool:
    """Return whether a value is a real number, of Python or NumPy, and no truth value."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_texts(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(map(_is_text, cast(Sequence[object], value)))


def _anything(value: object) -> bool:
    return True


def _argument(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


_SWITCH = {"on": True, "true": True, "off": False, "false": False}
_TEXTS = "a list of strings, none of them empty"
_STRINGS = Kind(_TEXTS, _each(_same), _are_texts, collect=tuple, fix="Give a list.")

# fmt: off
KINDS: Mapping[str, Kind] = {
    "int": Kind("an integer", _integer, is_integer, int, "N", is_number=True),
    "float": Kind("a number", _float, is_number, float, "X", is_number=True),
    "bool": Kind(
        "True or False", lambda value: bool(value) if isinstance(value, np.bool_) else value,
        lambda value: type(value) is bool, lambda text: _SWITCH[text.lower()], "on|off", fix="Give True or False.",
    ),
    "str": Kind("a text that is not empty", _same, _is_text),
    "str | int": Kind(
        "a text that is not empty, or a token id", _integer, lambda value: _is_text(value) or is_integer(value),
        lambda text: int(text) if text.isdecimal() else text, "TEXT|ID",
    ),
    "str | Sequence[str]": Kind(
        f"a string or {_TEXTS}", _STRINGS.convert, lambda value: _is_text(value) or _are_texts(value), collect=tuple,
    ),
    "Sequence[str]": _STRINGS,
    "tuple[str, ...]": _STRINGS,
    # Token ids are accepted when the size of the vocabulary is known.
    "Sequence[int]": Kind("a list of token ids", _each(_integer), _anything, int, "ID", tuple),
    "Sequence[Sequence[int]]": Kind(
        "a list of lists of token ids", _each(_each(_integer)), _anything,
        lambda text: tuple(map(int, text.split(","))), "ID,ID", tuple,
    ),
    "Mapping[int, float]": Kind(
        "a mapping from token ids to numbers",
        lambda given: {_integer(i): _float(x) for i, x in given.items()} if isinstance(given, Mapping) else given,
        _anything, _bias, "ID=X", dict,
    ),
    "Mapping[str, object]": Kind(
        "a mapping from names to values", lambda given: dict(given) if isinstance(given, Mapping) else given,
        lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
        _argument, "NAME=JSON", dict,
    ),
    "object": Kind("a mapping", _same, _anything),
}
"""Annotation, without None → the values."""
