"""The specification of one tensor as a value, read by the checks, the reference page and the property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from foreword.arrays import AnyArray
from foreword.batch.proof.spec.step import Step
from foreword.batch.state.layout import ROWS
from foreword.batch.step.layout import FIELDS
from foreword.batch.values.fields import Field


class Level(StrEnum):
    """The kind of object that one entry of a tensor belongs to."""

    SYSTEM = "system"  # a row of the state, from admission to removal
    STEP = "step"  # the whole batch
    REQUEST = "request"  # a request of the batch, in batch order
    TOKEN = "token"  # a scheduled token
    LOGIT = "logit"  # a token that is projected to logits, or a draft


@dataclass(frozen=True, slots=True)
class Relation:
    """A rule that fixes entries of a tensor: ``formula`` for readers, ``expected`` computes it.

    expected(step, got, group) returns the values that live entries must have, and those of ``got`` where the rule
    allows any value.
    """

    formula: str
    expected: Callable[[Step, AnyArray, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor.

    shape: symbols, see `SYMBOLS`. An axis ``Tp`` or ``Bp`` has T or B live entries; the rest hold ``padding``. At
    system level ``padding`` is the value of a row without a request. None: unspecified, not to be read.
    range: lowest and highest live value (symbols allowed, None: no bound). It is checked where no relation fixes the
    value; where one does, it follows.
    per_group: a tuple of such tensors, one per KV group. optional: present only under the named condition.
    """

    name: str
    level: Level
    shape: tuple[str, ...]
    dtype: str
    definition: str
    consumers: str
    producer: str = "prepare_inputs"
    padding: int | float | str | None = None
    range: tuple[int | float | str, int | float | str | None] | None = None
    relations: tuple[Relation, ...] = ()
    per_group: bool = False
    optional: str | None = None
    attribute: str | None = None  # the path to it from the states, if not its name; "explain": of an explanation;
    # "function": what the function of foreword.batch of this name returns for the batch

    @property
    def label(self) -> str:
        """The name in messages. It tells tensors of the state and of the batch apart, which share some names."""
        return f"states.{self.name}" if self.level is Level.SYSTEM else self.name

    @property
    def expression(self) -> str:
        """Return the Python expression that reads the tensor from ``batch`` or ``states``; ``g`` is a KV group."""
        group = "[g]" if self.per_group else ""
        if self.attribute == "explain":
            return f"batch.explain({'g' if group else ''}).{self.name}"
        if self.attribute == "function":
            return f"{self.name}(batch)"
        first, _, rest = (self.attribute or self.name).partition(".")
        root = "states" if self.level is Level.SYSTEM else "batch"
        return f"{root}.{first}{group}{rest and '.' + rest}"


def row_tensor(name: str, definition: str, *relations: Relation, **facts: Any) -> TensorSpec:
    """Return the specification of a column of `RequestStates`, with the shape, dtype and padding of its layout."""
    field = next(field for field in ROWS if field.name == name)
    return _of_field(field, level=Level.SYSTEM, definition=definition, relations=relations, **facts)


def step_tensor(level: Level, name: str, definition: str, *relations: Relation, **facts: Any) -> TensorSpec:
    """Return the specification of a tensor of `InputBuffers`, with the shape, dtype and padding of its layout."""
    return _of_field(FIELDS[name], level=level, definition=definition, relations=relations, **facts)


PADDED_AXES = ("R", "Bp", "Bp+1", "Tp")  # a view of a step without padding has no padded entries


def _of_field(field: Field, **facts: Any) -> TensorSpec:
    return TensorSpec(
        name=field.name,
        shape=field.shape,
        dtype=field.dtype,
        padding=field.padding if field.shape[0] in PADDED_AXES else None,
        per_group=field.per_group,
        **facts,
    )


SYMBOLS = {
    "T": "scheduled tokens of the step",
    "B": "requests of the step",
    "Tp": "tokens after padding",
    "Bp": "requests after padding",
    "L": "logit rows: Σ (1 + drafts)",
    "D": "drafts of the step",
    "R": "rows of the state: max_num_reqs",
    "M": "max_model_len",
    "V": "vocab_size",
    "S": "block_size of a KV group",
    "P": "positions that one block-table entry covers: S, or S·n where n ranks share the group",
    "K": "entries of a block-table row: ceil(M / P)",
}
