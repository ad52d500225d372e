"""Corruptions of what the reference pages name: for each name, ways in which the code could be wrong about it.

    a tensor or value that is read    its first, or its last, element is changed
    a result with fields              the same for each field
    an array or map of the states     keeps what it held when the states were made: every write is lost
    a function that returns nothing   does nothing
    a field of a value that users make (a request, a KV group)   is ignored: has its default
    a buffer                          the batch's tensor is at another address in each step

`SPECIAL` holds what needs more than its kind. A mutation is installed in a process of its own and never undone.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from foreword.batch import InputBatch, InputBuffers, RequestStates
from foreword.batch.adapters.vllm import VllmAdapter
from reference.pages import MODULES, Row, Subject, subject

FIRST, LAST = 0, -1


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A way to be wrong. install: makes this process wrong in that way; None: there is none."""

    label: str
    install: Callable[[], None] | None


class Effect:
    """The state of a mutation: whether it changes anything (a control does not), has changed it, and has failed."""

    active = True
    changed = False
    error: Exception | None = None


# -- values ---------------------------------------------------------------------------------------------------


def corrupted(value: Any, at: int) -> Any:
    """The value with its first or last element changed; the value itself where there is nothing to change."""
    if not Effect.active:
        return value
    try:
        other = _corrupted(value, at)
    except Exception as error:
        Effect.error = error
        raise
    Effect.changed |= other is not value
    return other


def _corrupted(value: Any, at: int) -> Any:
    match value:
        case None:
            return value
        case np.ndarray():
            if not value.size:
                return value
            out = value.copy()
            flat = out.reshape(-1)
            flat[at] = not flat[at] if out.dtype == np.bool_ else flat[at] + 1
            return out
        case bool() | np.bool_():
            return not value
        case Enum():
            members = list(type(value))
            return members[(members.index(value) + 1) % len(members)]
        case int() | float() | np.number():
            return value + 1
        case str():
            return value + "?"
        case dict():
            if not value:
                return value
            key = list(value)[at]
            return {**value, key: _corrupted(value[key], at)}
        case tuple() if hasattr(value, "_fields"):
            return value._replace(**{value._fields[at]: _corrupted(value[at], at)})
        case tuple() | list():
            if not len(value):
                return value
            items = list(value)
            for i in range(len(items)) if at == FIRST else reversed(range(len(items))):
                if (other := _corrupted(items[i], at)) is not items[i]:
                    items[i] = other
                    return type(value)(items)
            return value
        case _ if dataclasses.is_dataclass(value):
            for field in list(dataclasses.fields(value))[:: 1 if at == FIRST else -1]:
                held = getattr(value, field.name)
                if (other := _corrupted(held, at)) is not held:
                    return dataclasses.replace(value, **{field.name: other})
            return value
    return None


def _with_field(value: Any, field: str, at: int) -> Any:
    """A dataclass or named tuple with one field corrupted."""
    held = getattr(value, field)
    if (other := corrupted(held, at)) is held:
        return value
    return (
        value._replace(**{field: other}) if isinstance(value, tuple) else dataclasses.replace(value, **{field: other})
    )


def _records() -> dict[str, dict[str, str]]:
    """Class name → field → annotation, of every dataclass and named tuple of the package."""
    found = {}
    for module in MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                found[value.__name__] = {f.name: str(f.type) for f in dataclasses.fields(value)}
            elif isinstance(value, type) and hasattr(value, "_fields"):
                found[value.__name__] = {f: str(value.__annotations__[f]) for f in value._fields}
    return found


RECORDS = _records()
SCALARS = {"int", "bool", "str", "float", "int | None", "AttentionState", "AscendState"}


def _ends(annotation: str) -> list[tuple[str, int]]:
    return [("changed", LAST)] if annotation in SCALARS else [("first element", FIRST), ("last element", LAST)]


def _corruptions(annotation: str) -> list[tuple[str, Callable[[Any], Any]]]:
    """The ways to corrupt a value of the annotated type."""
    if annotation in RECORDS:
        return [
            (f"{field}: {end}", functools.partial(_with_field, field=field, at=at))
            for field, kind in RECORDS[annotation].items()
            for end, at in _ends(kind)
        ]
    return [(end, functools.partial(corrupted, at=at)) for end, at in _ends(annotation)]


# -- installing -----------------------------------------------------------------------------------------------


def rebind(old: Any, new: Any) -> None:
    """Every module that holds ``old`` holds ``new`` instead."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def replace_function(s: Subject, new: Callable[..., Any]) -> None:
    """Put another function in the place of a method or of a module's function."""
    if isinstance(s.holder, ModuleType):
        rebind(s.value, functools.wraps(s.value)(new))
        return
    for cls in s.owner.__mro__:
        if s.attribute in vars(cls):
            setattr(cls, s.attribute, functools.wraps(vars(cls)[s.attribute])(new))
            return


def function_of(s: Subject) -> FunctionType:
    """The plain function behind a name."""
    if isinstance(s.holder, ModuleType):
        return s.value
    return next(vars(cls)[s.attribute] for cls in s.owner.__mro__ if s.attribute in vars(cls))


def changed_result(s: Subject, change: Callable[[Any], Any]) -> None:
    """The function returns a changed result."""
    old = function_of(s)
    replace_function(s, lambda *args, **kw: change(old(*args, **kw)))


def nothing_done(s: Subject) -> None:
    """The function returns at once."""
    old = function_of(s)
    result = True if _returns(old) == "bool" else None

    def nothing(*args: Any, **kw: Any) -> Any:
        Effect.changed = True
        return result if Effect.active else old(*args, **kw)

    replace_function(s, nothing)


def changed_attribute(cls: type, name: str, change: Callable[[Any], Any]) -> None:
    """Reading the attribute, a property or another descriptor of the class, gives a changed value."""
    old = inspect.getattr_static(cls, name)
    setter = (lambda self, value: old.__set__(self, value)) if hasattr(old, "__set__") else None
    setattr(cls, name, property(lambda self: change(old.__get__(self, type(self))), setter))


def after_init(cls: type, name: str, change: Callable[[Any], Any]) -> None:
    """Every object of the dataclass has the field changed as soon as it is made."""
    old = cls.__init__

    @functools.wraps(old)
    def init(self: Any, *args: Any, **kw: Any) -> None:
        old(self, *args, **kw)
        object.__setattr__(self, name, change(getattr(self, name)))

    cls.__init__ = init


def after_calls(hook: Callable[[], None]) -> None:
    """Call the hook after every public method of the states' classes, and every function of states."""

    def hooked(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def new(*args: Any, **kw: Any) -> Any:
            try:
                return old(*args, **kw)
            finally:
                hook()

        return new

    states = subject("states.req_ids").holder
    for cls in (RequestStates, type(states.sampling), type(states.block_tables[0]), type(states.loras)):
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType) and not name.startswith("_"):
                setattr(cls, name, hooked(value))
    for module in MODULES:
        for value in list(vars(module).values()):
            is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if is_own and next(iter(inspect.signature(value).parameters), "") == "states":
                rebind(value, hooked(value))


def writes_lost(find: Callable[[RequestStates], list[Any]]) -> None:
    """The arrays and maps keep what they held when the states were made."""
    kept: list[tuple[Any, Any]] = []
    old = RequestStates.__init__

    @functools.wraps(old)
    def init(self: RequestStates, *args: Any, **kw: Any) -> None:
        old(self, *args, **kw)
        kept.extend((held, held.copy()) for held in find(self))

    def restore() -> None:
        for held, before in kept if Effect.active else ():
            if isinstance(held, dict):
                Effect.changed |= held != before
                held.clear()
                held.update(before)
            elif not np.array_equal(held, before):
                Effect.changed = True
                held[...] = before

    RequestStates.__init__ = init
    after_calls(restore)


def other_address(s: Subject) -> None:
    """The batch's tensor is a copy, made again for each step."""

    def copied(value: Any) -> Any:
        if not Effect.active:
            return value
        Effect.changed = True
        return tuple(v.copy() for v in value) if isinstance(value, tuple) else None if value is None else value.copy()

    changed_attribute(InputBatch, s.attribute, copied)


def ignored(s: Subject) -> None:
    """A value that users make has the field's default."""
    field = next(f for f in dataclasses.fields(s.owner) if f.name == s.attribute)

    def default(value: Any) -> Any:
        Effect.changed |= value is not field.default
        return field.default if Effect.active else value

    after_init(s.owner, s.attribute, default)


def _returns(function: Any) -> str:
    return str(getattr(function, "__annotations__", {}).get("return", ""))


# -- what a name's mutations are --------------------------------------------------------------------------------


def mutations(row: Row, name: str) -> list[Mutation]:
    """The corruptions of one name of one row, each of which the row's proof has to catch."""
    s = subject(name)
    if special := SPECIAL.get(name):
        return special(row, s)
    if s.root == "buffers" and isinstance(s.value, np.ndarray | tuple):
        return [Mutation("another address in each step", lambda: other_address(s))]
    is_property = isinstance(inspect.getattr_static(s.owner, s.attribute, None), property)
    if s.root in ("states", "table", "adapter") and isinstance(s.value, np.ndarray | dict) and not is_property:
        return [Mutation("writes are lost", lambda: writes_lost(functools.partial(_held, s)))]
    if s.is_field and (s.root == "request" or s.owner.__name__ == "KVGroup"):
        field = next(f for f in dataclasses.fields(s.owner) if f.name == s.attribute)
        if field.default is not dataclasses.MISSING:
            return [Mutation("ignored", lambda: ignored(s))]
    if s.is_field:
        kind = RECORDS[s.owner.__name__][s.attribute]
        return [
            Mutation(label, lambda change=change: after_init(s.owner, s.attribute, change))
            for label, change in _corruptions(kind)
        ]
    if isinstance(s.value, type):
        if not dataclasses.is_dataclass(s.value):
            raise LookupError(f"`{name}` is a class: name the method or property that has the job")
        return [
            Mutation(f"{field}: {label}", lambda field=field, change=change: after_init(s.value, field, change))
            for field, kind in RECORDS[s.value.__name__].items()
            for label, change in _corruptions(kind)
        ]
    static = s.value if isinstance(s.holder, ModuleType) else inspect.getattr_static(s.owner, s.attribute)
    if isinstance(static, FunctionType):
        if _returns(static) in ("None", "bool"):
            return [Mutation("does nothing", lambda: nothing_done(s))]
        if _returns(static) == "InputBatch":
            raise LookupError(f"`{name}` makes a batch: name its tensors")
        return [
            Mutation(f"result, {label}", lambda change=change: changed_result(s, change))
            for label, change in _corruptions(_returns(static))
        ]
    if hasattr(static, "__get__"):
        kind = _returns(static.fget) if isinstance(static, property) else ""
        return [
            Mutation(label, lambda change=change: changed_attribute(s.owner, s.attribute, change))
            for label, change in _corruptions(kind)
        ]
    raise LookupError(f"`{name}` has no mutation")


def _held(s: Subject, states: RequestStates) -> list[Any]:
    """The arrays or maps of some states that a name means: one per KV group for ``table``, vLLM's for ``adapter``."""
    holders: list[Any] = [states]
    if s.root == "table":
        holders = list(states.block_tables)
    elif s.root == "adapter":
        holders = [VllmAdapter.of(states)]
    return [functools.reduce(getattr, s.path, holder) for holder in holders]


# -- names that need more than their kind -----------------------------------------------------------------------


def _calls(s: Subject, new: Callable[..., Any]) -> Callable[[], None]:
    """An installer of ``new(old, *args, **kw)`` in the place of a function."""

    def install() -> None:
        old = function_of(s)

        def call(*args: Any, **kw: Any) -> Any:
            Effect.changed = True
            return new(old, *args, **kw) if Effect.active else old(*args, **kw)

        replace_function(s, call)

    return install


def _row_arrays_lost(row: Row, s: Subject, unwritten: Sequence[str] = ()) -> list[Mutation]:
    """The function leaves one array of the rows as it was, for each array that it writes."""

    def paths(states: RequestStates) -> dict[str, Any]:
        found = {n: v for n, v in vars(states).items() if isinstance(v, np.ndarray) and not n.startswith("_")}
        found |= {f"sampling.{n}": getattr(states.sampling, n) for n in ("temperature", "top_k", "seed", "needs")}
        found |= {f"block_tables[{g}].{n}": getattr(t, n) for g, t in enumerate(states.block_tables)
                  for n in ("table", "num_blocks")}  # fmt: skip
        return found

    def without(name: str) -> Callable[..., Any]:
        def call(old: Any, states: RequestStates, *args: Any, **kw: Any) -> Any:
            array = paths(states).get(name)
            before = None if array is None else array.copy()
            result = old(states, *args, **kw)
            if array is not None:
                array[...] = before
            return result

        return call

    written = [n for n in paths(subject("states.req_ids").holder) if n not in ("live", "row_generation", *unwritten)]
    return [Mutation(f"{n} is left as it was", _calls(s, without(n))) for n in written]


def _added(row: Row, s: Subject) -> list[Mutation]:
    generic = [Mutation("another row", lambda: changed_result(s, functools.partial(corrupted, at=LAST)))]
    unwritten = ["num_placeholders", "num_accepted_tokens"]
    if s.attribute == "add_requests":  # columns hold neither adapters of the states' own nor extras
        unwritten += ["lora_id", "rope_delta", "encoder_len", "sampling.seed"]
    return generic + _row_arrays_lost(row, s, unwritten)


def _dummy(row: Row, s: Subject) -> list[Mutation]:
    def more(old: Any, *args: Any, num_tokens: int, **kw: Any) -> Any:
        return old(*args, num_tokens=num_tokens + 1, **kw)

    def writing(old: Any, states: Any, buffers: Any, **kw: Any) -> Any:
        batch = old(states, buffers, **kw)
        buffers["slot_mapping"][-1][0] = 1
        return batch

    def reading(old: Any, states: Any, buffers: Any, **kw: Any) -> Any:
        batch = old(states, buffers, **kw)
        buffers["block_table"][-1][0, 0] = 1
        return batch

    def without(name: str) -> Callable[..., Any]:
        return lambda old, *args, **kw: old(*args, **{k: v for k, v in kw.items() if k != name})

    def elsewhere(old: Any, states: Any, buffers: Any, **kw: Any) -> Any:
        return old(states, type(buffers).for_states(states, buffers.max_num_batched_tokens), **kw)

    return [
        Mutation("one more token", _calls(s, more)),
        Mutation("a slot that is written", _calls(s, writing)),
        Mutation("a block that is read", _calls(s, reading)),
        Mutation("other buffers", _calls(s, elsewhere)),
        *(Mutation(f"{n} is ignored", _calls(s, without(n)))
          for n in ("num_computed", "num_drafts", "context_block", "pad_to")),
    ]  # fmt: skip


class _Without:
    """A scheduler output, or a part of it, with one field empty."""

    def __init__(self, whole: Any, path: list[str]) -> None:
        self._whole, self._path = whole, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._whole, name)
        if name != self._path[0] or value is None:
            return value
        if len(self._path) == 1:
            return type(value)()
        return (
            [_Without(v, self._path[1:]) for v in value] if isinstance(value, list) else _Without(value, self._path[1:])
        )


OUTPUT_FIELDS = {
    "scheduled_new_reqs": "scheduled_new_reqs",
    "finished_req_ids": "finished_req_ids",
    "preempted_req_ids": "preempted_req_ids",
    **{
        name: f"scheduled_cached_reqs.{name}"
        for name in ("resumed_req_ids", "all_token_ids", "new_token_ids", "num_output_tokens")
    },
    "new_block_ids": "scheduled_cached_reqs.new_block_ids",
    "prefill_token_ids": "scheduled_new_reqs.prefill_token_ids",
}


def _applied(row: Row, s: Subject) -> list[Mutation]:
    """The fields of the scheduler's output that the row names are not read; for a row that names none, each field."""
    named = {n: p for n, p in OUTPUT_FIELDS.items() if n in row.theirs}

    def without(path: str) -> Callable[..., Any]:
        return lambda old, states, out: old(states, _Without(out, path.split(".")))

    def computed_ignored(old: Any, states: RequestStates, out: Any) -> Any:
        step = old(states, out)
        for rid in out.scheduled_cached_reqs.req_ids:
            if rid in states:
                states.num_computed_tokens[states.row_of(rid)] = 0
        return step

    def idle_ignored(old: Any, states: RequestStates, out: Any) -> Any:
        if not out.num_scheduled_tokens:
            for path in ("scheduled_new_reqs", "finished_req_ids", "preempted_req_ids"):
                out = _Without(out, [path])
        return old(states, out)

    if "zero tokens" in row.theirs[0]:
        return [Mutation("an output without tokens is not applied", _calls(s, idle_ignored))]
    chosen = named or {n: OUTPUT_FIELDS[n] for n in ("scheduled_new_reqs", "finished_req_ids", "preempted_req_ids")}
    found = [Mutation(f"{n} is not read", _calls(s, without(p))) for n, p in chosen.items()]
    if "scheduled_cached_reqs" in row.theirs or "num_computed_tokens" in row.theirs:
        return [Mutation("num_computed_tokens is not read", _calls(s, computed_ignored))]
    return found


def _ring(row: Row, s: Subject) -> list[Mutation]:
    def never_refuses(old: Any, ring: Any, *args: Any) -> Any:
        ring._busy = [False] * len(ring._busy)
        return old(ring, *args)

    def same_slot(old: Any, ring: Any, *args: Any) -> Any:
        ring._next = 0
        return old(ring, *args)

    return [
        Mutation("a slot in flight is handed out", _calls(s, never_refuses)),
        Mutation("always the first slot", _calls(s, same_slot)),
    ]


def _ignored_order(row: Row, s: Subject) -> list[Mutation]:
    return [Mutation("the order of the plan is kept", _calls(s, lambda old, plan, *args: plan))]


def _anew(row: Row, s: Subject) -> list[Mutation]:
    return [Mutation("made again in each step", _calls(s, lambda old, batch: dataclasses.replace(old(batch))))]


def _tables(row: Row, s: Subject) -> list[Mutation]:
    return [Mutation("the last group's table loses its writes",
                     lambda: writes_lost(lambda states: [states.block_tables[-1].table]))]  # fmt: skip


def _allocated_anew(row: Row, s: Subject) -> list[Mutation]:
    def anew(old: Any, *args: Any, **kw: Any) -> Any:
        kept.append(old(*args, **kw).copy())
        return kept[-1]

    kept: list[Any] = []
    return [Mutation("allocated anew in each call", _calls(s, anew))]


def _token(row: Row, s: Subject) -> list[Mutation]:
    def any_position(old: Any, states: RequestStates, *args: Any) -> Any:
        mask, states.extras.is_embedding = states.extras.is_embedding, None
        try:
            return old(states, *args)
        finally:
            states.extras.is_embedding = mask

    return [
        Mutation("another token", lambda: changed_result(s, functools.partial(corrupted, at=LAST))),
        Mutation("an embedding has a token", _calls(s, any_position)),
    ]


def _allocated(row: Row, s: Subject) -> list[Mutation]:
    def install() -> None:
        old = InputBuffers.for_states

        def ordinary(states: Any, max_num_batched_tokens: int, *, allocator: Any = None) -> InputBuffers:
            Effect.changed |= allocator is not None
            return old(states, max_num_batched_tokens, allocator=None if Effect.active else allocator)

        InputBuffers.for_states = staticmethod(ordinary)

    return [Mutation("ordinary memory", install)]


def _null_block(row: Row, s: Subject) -> list[Mutation]:
    def always(null: int) -> Callable[[], None]:
        def install() -> None:
            old = RequestStates.__init__

            @functools.wraps(old)
            def init(self: RequestStates, *, null_block: int = 0, **kw: Any) -> None:
                Effect.changed |= null_block != null
                old(self, null_block=null if Effect.active else null_block, **kw)

            RequestStates.__init__ = init

        return install

    return [Mutation(f"always {null}", always(null)) for null in (0, -1)]


def _planned(row: Row, s: Subject) -> list[Mutation]:
    """Each field of the plan but the one that a scheduler's output never has."""
    return [
        Mutation(label, lambda change=change: changed_attribute(s.owner, s.attribute, change))
        for label, change in _corruptions("Plan")
        if not label.startswith("cancelled")
    ]


def _from_vllm(row: Row, s: Subject) -> list[Mutation]:
    """Each field of the request but the arrays that vLLM's data never has."""
    return [
        Mutation(label, lambda change=change: changed_result(s, change))
        for label, change in _corruptions("NewRequest")
        if not label.startswith(("mrope_positions", "encoder_input"))
    ]


SPECIAL: dict[str, Callable[[Row, Subject], list[Mutation]]] = {
    "states.add_request": _added,
    "states.add_requests": _added,
    "states.condense": _row_arrays_lost,
    "states.swap_rows": _row_arrays_lost,
    "states.block_tables": _tables,
    "get_token_id": _token,
    "sampling_metadata": _anew,
    "buffers.optional": _allocated_anew,
    "InputBuffers.for_states": _allocated,
    "states.null_block": _null_block,
    "adapters.vllm.AppliedStep.arrays": _planned,
    "prepare.plan.decode_first": _ignored_order,
    "make_dummy": _dummy,
    "adapters.vllm.apply": _applied,
    "adapters.vllm_requests.new_request": _from_vllm,
    "StagingRing.acquire": _ring,
}
