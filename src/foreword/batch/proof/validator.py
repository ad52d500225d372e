"""Check a batch and its state against the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.batch.features.bidirectional import bidirectional_ranges
from foreword.batch.features.explain import token_sources
from foreword.batch.proof.spec import TENSORS, Level, TensorSpec
from foreword.batch.proof.spec.step import Step
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import PlanError

_FUNCTIONS = {"bidirectional_ranges": bidirectional_ranges}
Compared = tuple[AnyArray, Any, int]  # got, expected, index of the first entry


@dataclass(frozen=True, slots=True)
class Rule:
    """One executable statement about a tensor. check(step, array, group) returns the arrays to compare, or None where
    it holds. It raises PlanError itself where there are no entries to compare.
    """

    spec: TensorSpec
    text: str
    check: Callable[[Step, AnyArray, int], Compared | None]

    @property
    def name(self) -> str:
        return f"{self.spec.label}: {self.text}"


def validate(batch: BatchTensors) -> None:
    """Check every tensor of the batch, and every row of the state, against `foreword.batch.proof.spec.TENSORS`.

    Call it between `prepare_inputs` and `commit`: the relations hold for the state that the step was made from.
    It is a debugging aid: it takes O(T + R·M) and allocates. Raise PlanError for the first entry that is wrong.
    """
    check_rules(RULES, batch)


def check_rules(rules: Iterable[Rule], batch: BatchTensors) -> None:
    """Check the batch as `validate` does, with these rules only."""
    if batch.is_committed:
        raise PlanError("validate a batch before it is committed: the state has moved on", step=batch.step)
    step = Step(batch)
    for spec, its in groupby(rules, key=lambda rule: rule.spec):
        arrays = list(arrays_of(spec, batch))
        for rule in its:
            for group, array in arrays:
                _compare(step, rule, group, array)


def arrays_of(spec: TensorSpec, batch: BatchTensors) -> Iterator[tuple[int, AnyArray]]:
    """Return (group, array) of each array that the specified tensor consists of in this batch; empty where it is not
    made.
    """
    states = batch.states
    if spec.optional == "gathered block tables" and not batch.is_gathered:
        return
    groups = range(len(states.block_tables)) if spec.per_group else (0,)
    for g in groups:
        if spec.attribute == "explain":
            value = getattr(token_sources(batch, g), spec.name)
        elif spec.attribute == "function":
            value = _FUNCTIONS[spec.name](batch)
        elif spec.level is Level.SYSTEM:
            path = (spec.attribute or spec.name).split(".")
            value = getattr(states, path[0])
            value = reduce(getattr, path[1:], value[g] if spec.per_group else value)
        else:
            value = getattr(batch, spec.name)
            value = value[g] if spec.per_group else value
        if value is not None:
            yield g, np.asarray(value)


def _compare(step: Step, rule: Rule, group: int, array: AnyArray) -> None:
    compared = rule.check(step, array, group)
    if compared is None:
        return
    got, expected, first = compared
    wrong = np.asarray(got != expected)
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    want = np.broadcast_to(expected, got.shape)[at]
    index: object = None
    if at:
        at = (at[0] + first, *at[1:])
        index = at if len(at) > 1 else at[0]
    label = f"{rule.spec.label}[{group}]" if rule.spec.per_group else rule.spec.label
    raise PlanError(rule.text, step=step.batch.step, request=_request(step, rule.spec, at), tensor=label, index=index,
                    expected=want.item(), got=got[at[0] - first, *at[1:]].item() if at else got.item())  # fmt: skip


def _request(step: Step, spec: TensorSpec, at: tuple[int, ...]) -> str | None:
    """Return the request that an entry belongs to; None for padding and scalars."""
    states = step.states
    if not at:
        return None
    if spec.level is Level.SYSTEM:
        return next((rid for rid in states.req_ids if states.row_of(rid) == at[0]), None)
    owners = {
        Level.REQUEST: np.arange(step.B),
        Level.TOKEN: step.b_of_token,
        Level.LOGIT: step.b_of_logit if spec.shape == ("L",) else np.arange(step.B),
    }[spec.level]
    if spec.shape == ("D",):
        owners = step.b_of_draft
    if at[0] >= len(owners) or step.cancelled[owners[at[0]]]:
        return None
    return states.req_id_of(int(step.rows[owners[at[0]]]))


# -- the rules that every specification implies ----------------------------------------------------------------------


def _symbol(step: Step, name: str, group: int) -> int:
    size = step.symbols.get((name, group))
    if size is None:
        size = step.symbols[name, group] = _size(step, name, group)
    return size


def _size(step: Step, name: str, group: int) -> int:
    if name.isdigit():
        return int(name)
    base, sign, extra = name.partition("-") if "-" in name else name.partition("+")
    s, table = step.states, step.states.block_tables[group]
    value = {
        "T": lambda: step.T,
        "B": lambda: step.B,
        "Tp": lambda: step.batch.num_tokens_padded,
        "Bp": lambda: step.batch.num_reqs_padded,
        "L": lambda: int(step.cu_logits[-1]),
        "D": lambda: int(step.cu_drafts[-1]),
        "R": lambda: s.max_num_reqs,
        "M": lambda: s.max_model_len,
        "V": lambda: s.vocab_size,
        "S": lambda: table.group.block_size,
        "P": lambda: table.tokens_per_block,
        "K": lambda: table.width,
    }[base]()
    return value + int(sign + extra) if extra else value


_LIVE = {"Tp": "T", "Bp": "B", "Bp+1": "B+1"}  # without padding


def _live(spec: TensorSpec, step: Step, array: AnyArray, group: int) -> AnyArray:
    """Return the entries that are not padding."""
    live = _LIVE.get
    return array[tuple(slice(_symbol(step, live(name, name), group)) for name in spec.shape)]


def _rules_of(spec: TensorSpec) -> Iterator[Rule]:
    if spec.level is not Level.STEP:
        yield _dtype(spec)
        yield _shape(spec)
    if spec.padding is not None:
        yield _padding(spec)
    if spec.range is not None and not spec.relations:
        yield _range(spec, *spec.range)
    for relation in spec.relations:
        yield _relation(spec, relation.formula, relation.expected)


def _dtype(spec: TensorSpec) -> Rule:
    dtype = np.dtype(spec.dtype)

    def same(s: Step, x: AnyArray, g: int) -> Compared | None:
        return None if x.dtype == dtype else (np.array(x.dtype.name), np.array(spec.dtype), 0)

    return Rule(spec, f"dtype is {spec.dtype}", same)


def _shape(spec: TensorSpec) -> Rule:
    def sizes(s: Step, x: AnyArray, g: int) -> Compared | None:
        shape = tuple(_symbol(s, name, g) for name in spec.shape)
        return None if x.shape == shape else (np.array(str(x.shape)), np.array(str(shape)), 0)

    return Rule(spec, f"shape is [{', '.join(spec.shape)}]", sizes)


def _padding_value(step: Step, spec: TensorSpec, group: int) -> Any:
    if spec.padding == "null":
        return step.states.null_block
    return _symbol(step, spec.padding, group) if isinstance(spec.padding, str) else spec.padding


def _padding(spec: TensorSpec) -> Rule:
    if spec.level is Level.SYSTEM:

        def free_rows(s: Step, x: AnyArray, g: int) -> Compared:
            rows = _live(spec, s, x, g)
            return rows, s.where_live(rows, np.full_like(rows, _padding_value(s, spec, g))), 0

        return Rule(spec, f"a row without a request holds {spec.padding}", free_rows)

    def tail(s: Step, x: AnyArray, g: int) -> Compared:
        live = len(_live(spec, s, x, g))
        return x[live:], np.asarray(_padding_value(s, spec, g), x.dtype), live

    return Rule(spec, f"padding is {spec.padding}", tail)


def _range(spec: TensorSpec, low: int | float | str, high: int | float | str | None) -> Rule:
    def clipped(s: Step, x: AnyArray, g: int) -> Compared:
        x = _live(spec, s, x, g)
        at_least, at_most = (_symbol(s, v, g) if isinstance(v, str) else v for v in (low, high))
        inside = np.clip(x, at_least, at_most)
        return x, s.where_live(inside, x) if spec.level is Level.SYSTEM else inside, 0

    return Rule(spec, f"values are in {low} … {'' if high is None else high}".rstrip(), clipped)


def _relation(spec: TensorSpec, formula: str, expected: Callable[[Step, AnyArray, int], Any]) -> Rule:
    def related(s: Step, x: AnyArray, g: int) -> Compared:
        x = _live(spec, s, x, g)
        return x, expected(s, x, g), 0

    return Rule(spec, formula, related)


RULES: tuple[Rule, ...] = tuple(rule for spec in TENSORS for rule in _rules_of(spec))
