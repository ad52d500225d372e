"""The memory of a step's tensors: allocated once, written every step, at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from foreword.arrays import I64, U8, AnyArray
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_metadata import SamplingMetadata, StepCache, StepNeeds, metadata_cache, needs_cache
from foreword.batch.step.arena import Allocator, carve
from foreword.batch.step.layout import FIELDS, STEP, shape_of
from foreword.batch.values.fields import Field
from foreword.errors import ConfigError
from foreword.integers import INT32_MAX, is_int32
from foreword.native import native

Arrays = AnyArray | tuple[AnyArray, ...]
T = TypeVar("T")


class InputBuffers:
    """The buffers that `prepare_inputs` writes and an `InputBatch` views: every tensor of `layout.STEP`, in one arena.

    The entries past a step's own hold the pad value at all times, so no value of a larger earlier batch can be read,
    and clearing costs what the earlier batch wrote.

    A batch is valid until the next `prepare_inputs` on its buffers; two steps in flight need two (`StagingRing`).

    max_num_batched_tokens bounds T and Tp; the states' max_num_reqs bounds B and Bp.
    arena: uint8, the memory of all of these tensors: one copy of it moves a whole step to a device.
    arrays: name → array, or a tuple of arrays, one per KV group. views: the same, read-only.
    """

    __slots__ = (
        "_allocator", "_attached", "_optional", "arena", "arrays", "core", "generation", "logits_metadata",
        "max_num_batched_tokens", "max_num_reqs", "metadata", "needs", "scalars", "slices", "states", "views",
        "written",
    )  # fmt: skip

    def __init__(
        self, states: RequestStates, *, max_num_batched_tokens: int, allocator: Allocator | None = None
    ) -> None:
        if not is_int32(max_num_batched_tokens, 1):
            raise ConfigError(f"max_num_batched_tokens={max_num_batched_tokens!r}: must be in [1, {INT32_MAX}]")
        self.states = states
        self.max_num_reqs = states.max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.generation = 0
        self._allocator = allocator
        shapes = [
            (shape_of(field, states, max_num_batched_tokens, group=g), field.dtype)
            for field in STEP
            for g in self._groups(field)
        ]
        self.arena: U8
        self.arena, carved = carve(shapes, allocator, self._sizes)
        arrays = iter(carved)
        self.arrays: dict[str, Arrays] = {field.name: self._named(field, arrays) for field in STEP}
        self.views = {name: _read_only(value) for name, value in self.arrays.items()}
        self.slices: dict[str, tuple[int, Arrays]] = {}  # name → (size, the last view of that size)
        self._optional: dict[tuple[str, int, int], AnyArray] = {}
        self.scalars: I64 = self["scalars"]
        self.written: I64 = self["written"]
        sampling = states.sampling, states.vocab_size
        self.needs: StepCache[StepNeeds] = needs_cache(states.sampling, self["idx_mapping"])
        self.metadata: StepCache[SamplingMetadata] = metadata_cache(*sampling, self["idx_mapping"])
        self.logits_metadata: StepCache[SamplingMetadata] = metadata_cache(*sampling, self["expanded_idx_mapping"])
        self.core: native.StepCore | None = None  # over these arrays, made by the native backend
        self._attached: dict[Hashable, Any] = {}

    @classmethod
    def for_states(
        cls, states: RequestStates, max_num_batched_tokens: int, *, allocator: Allocator | None = None
    ) -> InputBuffers:
        """Return buffers that fit ``states``, for steps of up to ``max_num_batched_tokens`` tokens, padding included.

        allocator(num_bytes) → writable uint8 memory of that size, pinned memory for example; None: ordinary memory.
        """
        return cls(states, max_num_batched_tokens=max_num_batched_tokens, allocator=allocator)

    def __repr__(self) -> str:
        """Return the sizes, and what the step in the buffers has."""
        tokens, reqs, *_ = self.written.tolist()
        return (
            f"<InputBuffers: {reqs} of {self.max_num_reqs} requests, {tokens} of {self.max_num_batched_tokens} tokens, "
            f"{self.arena.nbytes} bytes>"
        )

    def __getitem__(self, name: str) -> Any:
        """Return a tensor's whole buffer, or a tuple of them, one per KV group."""
        return self.arrays[name]

    def optional(self, name: str, group: int = 0, size: int = 0) -> Any:
        """Return the whole buffer of a tensor of `layout.OPTIONAL`, allocated on first use; its address stays from then
        on.

        size: the number of entries of an axis that the states do not determine (``dims``, ``Lp``, ``C/S``).
        """
        key = name, group, size
        array = self._optional.get(key)
        if array is None:
            field = FIELDS[name]
            shape = shape_of(field, self.states, self.max_num_batched_tokens, group=group, size=size)
            array = carve([(shape, field.dtype)], self._allocator, self._sizes)[1][0]
            if padding := self._padding(field):
                array[...] = padding
            self._optional[key] = array
        return array

    def attach(self, key: Hashable, make: Callable[[InputBuffers], T]) -> T:
        """Return what is attached under ``key``, which ``make(self)`` makes on the first call: what a reader of steps
        keeps per buffers, such as their arrays in the form that its native code takes. It lives as long as the buffers.
        """
        found: T | None = self._attached.get(key)
        if found is None:
            found = self._attached[key] = make(self)
        return found

    @property
    def _sizes(self) -> str:
        """The parameters that determine the shapes, for messages."""
        s = self.states
        return (
            f"max_num_batched_tokens={self.max_num_batched_tokens}, max_num_reqs={s.max_num_reqs}, "
            f"max_model_len={s.max_model_len}, max_num_draft_tokens={s.max_num_draft_tokens}"
        )

    def _groups(self, field: Field) -> range:
        return range(len(self.states.block_tables) if field.per_group else 1)

    def _named(self, field: Field, arrays: Any) -> Arrays:
        """Return the field's arrays with the pad value everywhere."""
        mine = tuple(next(arrays) for _ in self._groups(field))
        if padding := self._padding(field):
            for array in mine:
                array[...] = padding
        return mine if field.per_group else mine[0]

    def _padding(self, field: Field) -> int:
        if field.padding == "null":
            return self.states.null_block
        return field.padding if isinstance(field.padding, int) else 0


def _read_only(value: Arrays) -> Arrays:
    if isinstance(value, tuple):
        return tuple(view for array in value if isinstance(view := _read_only(array), np.ndarray))
    view = value.view()
    view.flags.writeable = False
    return view
