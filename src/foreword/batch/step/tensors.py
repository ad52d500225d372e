"""The tensors of one step, as functions of a batch read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

import numpy as np

from foreword.arrays import I32, I64, AnyArray, Bools
from foreword.batch.state.request_states import RequestStates
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.layout import EXTENTS, FIELDS, GATHERED, Scalars
from foreword.batch.values.attention import AttentionState
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.plan import Check, Plan
from foreword.errors import ForewordError, PlanError
from foreword.integers import INT32_MAX

_T = TypeVar("_T")
PREPARED, ADVANCED, COMMITTED = range(3)  # stages of a batch

BackendFunction = Callable[[RequestStates, InputBuffers, Plan, tuple[int, int], bool], Scalars]
"""backend(states, buffers, plan, (tokens, requests) to pad to or −1, gather): write the step's tensors to the buffers,
and return its `Scalars`. PlanError and CapacityError as in `foreword.batch.prepare.plan.check`; then nothing changed.
"""


class TensorBackend(ABC):
    """A `BackendFunction` whose tensors are elsewhere than in the buffers, such as on a device."""

    @abstractmethod
    def __call__(
        self, states: RequestStates, buffers: InputBuffers, plan: Plan, pad: tuple[int, int], gather: bool
    ) -> Scalars: ...

    @abstractmethod
    def tensors(self, batch: BatchTensors) -> Mapping[str, Any]:
        """Return the tensors of a batch that it prepared, by name: a tuple of one per KV group where the batch has a
        tuple.
        """

    @abstractmethod
    def check(self, batch: BatchTensors) -> None:
        """Raise PlanError for the first of these tensors that differs from the batch's own."""


class StaleBatchError(ForewordError, RuntimeError):
    """A batch was used after the next `prepare_inputs` on its buffers."""


class Scalar:
    """The step's scalar of this name, without the ``_`` of a private one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.index = Scalars._fields.index(name.removeprefix("_"))

    @overload
    def __get__(self, batch: None, owner: type) -> Scalar: ...
    @overload
    def __get__(self, batch: BatchTensors, owner: type) -> int: ...
    def __get__(self, batch: BatchTensors | None, owner: type) -> Any:
        if batch is None:
            return self
        if batch._generation != batch.buffers.generation:
            batch._check_alive()
        return batch.scalars[self.index]


class View(Generic[_T]):
    """The step's entries of the buffer of this name, read-only; of each KV group where there is one per group."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        extent = EXTENTS[FIELDS[name].shape[0]]
        self.index, self.extra = Scalars._fields.index(extent.scalar), extent.extra
        self.gathered = name in GATHERED

    @overload
    def __get__(self, batch: None, owner: type) -> View[_T]: ...
    @overload
    def __get__(self, batch: BatchTensors, owner: type) -> _T: ...
    def __get__(self, batch: BatchTensors | None, owner: type) -> Any:
        if batch is None:
            return self
        buffers, size = batch.buffers, batch.scalars[self.index] + self.extra
        if batch._generation != buffers.generation:
            batch._check_alive()
        if self.gathered and not batch.is_gathered:
            raise _not_gathered(batch, self.name)
        last = buffers.slices.get(self.name)
        if last is not None and last[0] == size:  # the sizes of one step are mostly those of the step before
            return last[1]
        view = buffers.views[self.name]
        sliced = tuple(v[:size] for v in view) if isinstance(view, tuple) else view[:size]
        buffers.slices[self.name] = size, sliced
        return sliced


class BatchTensors:
    """The tensors of one step, in batch order: read-only views of the buffers, valid until the next `prepare_inputs`
    on them. `foreword.batch.proof.spec` describes each one.

    states: what the step was prepared from, for kernels that read their block tables through ``idx_mapping``.
    step: number of the step, for messages.
    scalars: the step's numbers by name, in one read. They may be read after the batch was replaced.
    buffers: the memory that the tensors are views of.
    block_ops: blocks to zero, then to copy, before the step reads or writes the cache.
    is_gathered: whether `block_table` and `num_blocks` were made. check: what `prepare_inputs` was asked to check.
    """

    __slots__ = (
        "_backend", "_generation", "_layout", "_req_ids", "_stage", "block_ops", "buffers", "check", "is_gathered",
        "scalars", "states", "step",
    )  # fmt: skip

    num_reqs = Scalar()
    num_tokens = Scalar()
    num_reqs_padded = Scalar()
    num_tokens_padded = Scalar()
    max_query_len = Scalar()
    max_seq_len = Scalar()
    _attention_state = Scalar()

    idx_mapping = View[I32]()  # [B] int32
    num_scheduled_tokens = View[I32]()  # [B] int32
    num_draft_tokens = View[I32]()  # [B] int32
    num_computed_tokens = View[I32]()  # [B] int32
    num_placeholders = View[I32]()  # [B] int32
    is_prefilling = View[Bools]()  # [B] bool
    row_generation = View[I64]()  # [B] int64
    query_start_loc = View[I32]()  # [Bp+1] int32
    seq_lens = View[I32]()  # [Bp] int32
    cu_num_logits = View[I32]()  # [B+1] int32
    cu_num_draft_tokens = View[I32]()  # [B+1] int32
    req_indices = View[I32]()  # [T] int32
    positions = View[I64]()  # [Tp] int64
    input_ids = View[I32]()  # [Tp] int32
    slot_mapping = View[tuple[I64, ...]]()  # [Tp] int64, one per KV group
    logits_indices = View[I64]()  # [L] int64
    expanded_idx_mapping = View[I32]()  # [L] int32
    expanded_local_pos = View[I32]()  # [L] int32
    target_logits_indices = View[I64]()  # [D] int64
    bonus_logits_indices = View[I64]()  # [B] int64
    draft_token_ids = View[I32]()  # [D] int32
    block_table = View[tuple[I32, ...]]()  # [Bp, K] int32, one per KV group
    num_blocks = View[tuple[I32, ...]]()  # [B] int32, one per KV group

    def __init__(
        self,
        states: RequestStates,
        buffers: InputBuffers,
        scalars: Scalars,
        req_ids: list[str] | None,
        is_gathered: bool,
        block_ops: BlockOps,
        backend: BackendFunction,
        check: Check = "off",
    ) -> None:
        self._generation = buffers.generation
        self.states = states
        self.buffers = buffers
        self.scalars = scalars
        self._req_ids = req_ids
        self._layout = states.layout_version
        self._stage = PREPARED
        self.is_gathered = is_gathered
        self.block_ops = block_ops
        self._backend = backend
        self.check: Check = check
        self.step = states._step + 1

    @property
    def is_current(self) -> bool:
        """Return whether no other step was prepared in its buffers: its tensors can be read."""
        return self._generation == self.buffers.generation

    @property
    def is_resolved(self) -> bool:
        """Return whether the samples it needs were known when it was prepared. If not, `resolve` it before it runs."""
        return self.scalars.num_unresolved == 0

    @property
    def is_pending(self) -> bool:
        """Return whether the batch was neither advanced nor committed."""
        return self._stage == PREPARED

    @property
    def is_committed(self) -> bool:
        """Return whether the step's samples were committed."""
        return self._stage == COMMITTED

    def _check_alive(self) -> None:
        """Raise StaleBatchError after the next `prepare_inputs` on the buffers."""
        if self._generation != self.buffers.generation:
            raise StaleBatchError(
                f"the batch of step {self.step} was replaced by a later prepare_inputs on the same buffers; "
                "read a batch before preparing the next, or alternate between two InputBuffers"
            )

    @property
    def req_ids(self) -> list[str]:
        """The scheduled requests, in batch order."""
        self._check_alive()
        if self._req_ids is None:
            freed = self.states.row_generation[self.idx_mapping] != self.row_generation
            if self._layout != self.states.layout_version or freed.any():
                raise StaleBatchError(f"step {self.step}: read req_ids before rows are freed or moved")
            self._req_ids = self.states._directory.ids_of(self.idx_mapping)
        return self._req_ids

    @property
    def attention_state(self) -> AttentionState:
        """The kind of step. See `AttentionState`."""
        return AttentionState(self._attention_state)

    @property
    def dcp_local_seq_lens(self) -> I32 | None:
        """The share of seq_lens that this rank has, int32 [Bp]; None without context parallelism."""
        if self.states.context_parallel is None:
            return None
        lens: I32 = self.padded("dcp_local_seq_lens", self.num_reqs_padded)
        return lens

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The step's tensors by name, as the backend "device" has them in the memory of the device.

        They are torch tensors with the entries, dtypes and padding of the arrays; a tensor of KV groups is a tuple with
        one for each group. There are also lora_tokens int32 [Tp], the adapter of each token, and rope_positions int64
        [Tp], positions + rope_delta. They are valid as long as the batch is. Raise PlanError for a batch of another
        backend.
        """
        self._check_alive()
        if not isinstance(self._backend, TensorBackend):
            raise PlanError("the batch has arrays in host memory alone: prepare it with backend='device', or read its "
                            "arrays, such as batch.input_ids", step=self.step, tensor="tensors")  # fmt: skip
        return self._backend.tensors(self)

    def padded(self, name: str, size: int) -> Any:
        """Return the first ``size`` entries of a tensor that has a pad value, for a captured graph: the step's, then
        padding.

        idx_mapping, expanded_idx_mapping −1; num_computed_tokens, is_prefilling, logits_indices, … 0 (`layout.STEP`).
        Raise PlanError for another tensor, and for a size below the step's or above the buffer's.
        """
        self._check_alive()
        view = self.buffers.views.get(name)
        if view is None or FIELDS[name].padding in (None, "T"):
            raise PlanError("the tensor has no pad value", tensor=name, expected="a name with padding in layout.STEP")
        if name in GATHERED and not self.is_gathered:
            raise _not_gathered(self, name)
        extent, capacity = EXTENTS[FIELDS[name].shape[0]], len(view[0] if type(view) is tuple else view)
        least = self.scalars[Scalars._fields.index(extent.scalar)] + extent.extra
        if not least <= size <= capacity:
            raise PlanError("a padded size out of range", tensor=name, expected=f"{least} … {capacity}", got=size)
        return tuple(v[:size] for v in view) if type(view) is tuple else view[:size]

    def optional(self, name: str, group: int = 0, size: int = 0) -> Any:
        """Return the whole buffer of a tensor of `layout.OPTIONAL`, which a function of the batch fills.

        See `InputBuffers.optional`.
        """
        self._check_alive()
        return self.buffers.optional(name, group, size)


def filled(batch: BatchTensors, name: str, values: AnyArray, group: int = 0, size: int = 0) -> Any:
    """Return `BatchTensors.optional` with these values, and no further entries. Raise PlanError for one that does not
    fit.
    """
    out = batch.optional(name, group, size)[: len(values)]
    if values.dtype.itemsize > out.dtype.itemsize:
        refuse_wide(batch, name, int(values.max(initial=0)))
    out[:] = values
    return out


def prefix_sum(batch: BatchTensors, name: str, lens: AnyArray, group: int = 0, size: int = 0) -> Any:
    """Return `BatchTensors.optional` with [n + 1] entries, out[i] = sum(lens[:i]), for lens [n]. Raise PlanError for a
    sum that does not fit.
    """
    refuse_wide(batch, name, int(lens.sum(dtype=np.int64)))
    out = batch.optional(name, group, size)[: len(lens) + 1]
    out[0] = 0
    np.cumsum(lens, out=out[1:])
    return out


def refuse_wide(batch: BatchTensors, name: str, largest: int) -> None:
    """Raise PlanError where the largest value of a tensor of int32 does not fit: for other systems' forms of a step."""
    if largest > INT32_MAX:
        raise PlanError("the step has a number that int32 does not hold; schedule fewer tokens, or use a form of int64 "
                        "such as slot_mapping", step=batch.step, tensor=name, expected=f"at most {INT32_MAX}",
                        got=largest)  # fmt: skip


def _not_gathered(batch: BatchTensors, name: str) -> PlanError:
    return PlanError("block tables were not gathered: pass gather_block_tables=True, or read the states' block_tables "
                     "through idx_mapping", step=batch.step, tensor=name)  # fmt: skip


def local_seq_lens(batch: BatchTensors, group: int = 0) -> I32:
    """Return the number of keys of each request on this rank, int32 [B]; all of them if the group is not spread over
    ranks.
    """
    spread = batch.states.block_tables[group].context_parallel is not None
    lens = batch.dcp_local_seq_lens if spread else None
    return (batch.seq_lens if lens is None else lens)[: batch.num_reqs]


def refuse_spread(batch: BatchTensors, group: int, what: str) -> None:
    """Raise PlanError where the group is spread over ranks, for forms that need all keys of a request on one rank."""
    if batch.states.block_tables[group].context_parallel is not None:
        raise PlanError(f"{what} needs all keys of a request on one rank", tensor=f"group {group}",
                        expected="context_parallel=False", got="True")  # fmt: skip
