"""One step: the scheduler's choice in, what the model and its attention kernels read out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np

from foreword.arrays import I32, I64, Bools
from foreword.batch.prepare import plan as _plan
from foreword.batch.prepare.backends import Run, Scalars, loops, native, vectorized
from foreword.batch.prepare.buffers import InputBuffers
from foreword.batch.prepare.plan import Drafts, Order, PlanLike, PlannedStep
from foreword.batch.prepare.views import BatchViews
from foreword.batch.values.attention import AttentionState, visible
from foreword.batch.values.block_ops import NO_BLOCK_OPS, BlockOps
from foreword.errors import ForewordError, PlanError
from foreword.native import available

if TYPE_CHECKING:
    from foreword.batch.proof.checker import Check
    from foreword.batch.proof.explain import Explanation
    from foreword.batch.state.request_states import RequestStates

Backend = Literal["auto", "loops", "numpy", "native"]
_T = TypeVar("_T")


class StaleBatchError(ForewordError, RuntimeError):
    """A batch was used after the next `prepare_inputs` on its buffers."""


class _Array(Generic[_T]):
    """The first entries of a buffer, read-only. How many: the scalars ``counts`` name, plus ``extra``."""

    def __init__(self, count: str, extra: int = 0) -> None:
        self.index, self.extra = Scalars._fields.index(count), extra

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, batch: None, owner: type) -> _Array[_T]: ...
    @overload
    def __get__(self, batch: InputBatch, owner: type) -> _T: ...
    def __get__(self, batch: InputBatch | None, owner: type) -> Any:
        if batch is None:
            return self
        batch._alive()
        size = batch._scalars[self.index] + self.extra
        view = batch._buffers.views[self.name]
        return tuple(v[:size] for v in view) if isinstance(view, tuple) else view[:size]


class _Scalar:
    """One of the step's scalars."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.index = Scalars._fields.index(name)

    @overload
    def __get__(self, batch: None, owner: type) -> _Scalar: ...
    @overload
    def __get__(self, batch: InputBatch, owner: type) -> int: ...
    def __get__(self, batch: InputBatch | None, owner: type) -> Any:
        if batch is None:
            return self
        batch._alive()
        return batch._scalars[self.index]


class InputBatch(BatchViews):
    """The tensors of one step, in batch order: read-only views of the buffers, valid until the next `prepare_inputs`
    on them. `foreword.batch.proof.spec` describes each one; `explain` shows them; `BatchViews` has derived tensors.
    """

    __slots__ = (
        "_advanced",
        "_block_ops",
        "_buffers",
        "_committed",
        "_gathered",
        "_generation",
        "_layout",
        "_req_ids",
        "_run",
        "_scalars",
        "_states",
        "step",
    )

    num_reqs = _Scalar()
    num_tokens = _Scalar()
    num_reqs_padded = _Scalar()
    num_tokens_padded = _Scalar()
    max_query_len = _Scalar()
    max_seq_len = _Scalar()

    idx_mapping = _Array[I32]("num_reqs")
    num_scheduled_tokens = _Array[I32]("num_reqs")
    num_draft_tokens = _Array[I32]("num_reqs")
    num_computed_tokens = _Array[I32]("num_reqs")
    num_placeholders = _Array[I32]("num_reqs")
    is_prefilling = _Array[Bools]("num_reqs")
    row_generation = _Array[I64]("num_reqs")
    query_start_loc = _Array[I32]("num_reqs_padded", 1)
    seq_lens = _Array[I32]("num_reqs_padded")
    cu_num_logits = _Array[I32]("num_reqs", 1)
    cu_num_draft_tokens = _Array[I32]("num_reqs", 1)
    req_indices = _Array[I32]("num_tokens")
    positions = _Array[I64]("num_tokens_padded")
    input_ids = _Array[I32]("num_tokens_padded")
    slot_mapping = _Array[tuple[I64, ...]]("num_tokens_padded")
    logits_indices = _Array[I64]("num_logits")
    expanded_idx_mapping = _Array[I32]("num_logits")
    expanded_local_pos = _Array[I32]("num_logits")
    target_logits_indices = _Array[I64]("num_draft_tokens")
    bonus_logits_indices = _Array[I64]("num_reqs")
    draft_token_ids = _Array[I32]("num_draft_tokens")

    def __init__(
        self,
        states: RequestStates,
        buffers: InputBuffers,
        scalars: tuple[int, ...],
        req_ids: list[str] | None,
        gathered: bool,
        run: Run,
        block_ops: BlockOps | None = None,
    ) -> None:
        buffers.generation += 1
        states.step += 1
        self._states = states
        self._buffers = buffers
        self._scalars = scalars
        self._req_ids = req_ids
        self._gathered = gathered
        self._run = run
        self._block_ops = block_ops
        self._generation = buffers.generation
        self._layout = states.layout_version
        self._committed = False
        self._advanced = False
        self.step = states.step

    def _alive(self) -> None:
        if self._generation != self._buffers.generation:
            raise StaleBatchError(
                f"the batch of step {self.step} was replaced by a later prepare_inputs on the same buffers; "
                "read a batch before preparing the next, or alternate between two InputBuffers"
            )

    @property
    def states(self) -> RequestStates:
        """The states it was prepared from, for kernels that read their block tables through ``idx_mapping``."""
        return self._states

    @property
    def req_ids(self) -> list[str]:
        """The scheduled requests, in batch order."""
        self._alive()
        if self._req_ids is None:
            freed = self._states.row_generation[self.idx_mapping] != self.row_generation
            if self._layout != self._states.layout_version or freed.any():
                raise StaleBatchError(f"step {self.step}: read req_ids before rows are freed or moved")
            self._req_ids = self._states.req_ids_of(self.idx_mapping)
        return self._req_ids

    @property
    def block_table(self) -> tuple[I32, ...]:
        """[Bp, K_g] of each KV group: the requests' blocks, null on padding, past the end and below the window."""
        self._alive()
        if not self._gathered:
            raise PlanError("block tables were not gathered: pass gather_block_tables=True, or read the states' "
                            "block_tables through idx_mapping", step=self.step, tensor="block_table")  # fmt: skip
        size = self.num_reqs_padded
        return tuple(t[:size] for t in self._buffers.views["block_table"])

    @property
    def num_blocks(self) -> tuple[I32, ...]:
        """[B] of each KV group: how many entries of the gathered block-table row are the request's."""
        self._alive()
        if not self._gathered:
            raise PlanError("block tables were not gathered: pass gather_block_tables=True", tensor="num_blocks")
        return tuple(n[: self.num_reqs] for n in self._buffers.views["block_table_written"])

    def tokens_per_block(self, group: int = 0) -> int:
        """Positions that one block-table entry of the group covers: S, or S·n under context parallelism."""
        return self._states.block_tables[group].tokens_per_block

    def kernel_block_table(self, group: int = 0) -> I32:
        """[Bp, K_g · r]: allocation block n stands for kernel blocks n·r … n·r + r − 1, r = S / kernel_block_size."""
        table, kv_group = self.block_table[group], self._states.block_tables[group].group
        ratio = kv_group.block_size // (kv_group.kernel_block_size or kv_group.block_size)
        expanded = np.multiply(table[:, :, None], ratio, dtype=np.int32) + np.arange(ratio, dtype=np.int32)
        return expanded.reshape(len(table), table.shape[1] * ratio).astype(np.int32, copy=False)

    @property
    def dcp_local_seq_lens(self) -> I32 | None:
        """[Bp] this rank's share of seq_lens; None without context parallelism."""
        self._alive()
        if self._states.context_parallel is None:
            return None
        view: I32 = self._buffers.views["dcp_local_seq_lens"][: self.num_reqs_padded]
        return view

    @property
    def block_ops(self) -> BlockOps:
        """Blocks to zero, then to copy, before the step reads or writes the cache."""
        return self._block_ops or NO_BLOCK_OPS

    @property
    def attention_state(self) -> AttentionState:
        """Which kind of step this is. See `AttentionState`."""
        self._alive()
        return AttentionState(self._scalars[8])

    def attention_mask(self, group: int = 0) -> Bools | None:
        """A dense mask, True = visible, made anew. PREFILL_NO_CACHE: one [max_query_len, max_query_len] for all;
        DECODE_ONLY: none; otherwise [T, max_seq_len], row t sees the keys of its request up to its position.
        """
        window = self._states.block_tables[group].group.sliding_window
        match self.attention_state:
            case AttentionState.DECODE_ONLY:
                return None
            case AttentionState.PREFILL_NO_CACHE:
                return visible(np.arange(self.max_query_len), self.max_query_len, window)
            case _:
                return visible(self.positions[: self.num_tokens], self.max_seq_len, window)

    def explain(self, group: int = 0, *, token: int | None = None) -> Explanation:
        """The step's derived tensors, printable as tables; with ``token`` as one sentence about that token."""
        from foreword.batch.proof.explain import Explanation

        return Explanation.of(self, self._states, group, token)

    # -- steps in flight -----------------------------------------------------------------------------------------

    @property
    def resolved(self) -> bool:
        """False where the step was prepared on top of samples not known then: `resolve` it before it runs."""
        self._alive()
        return self._scalars[9] == 0

    def resolve(self, draft_tokens: Drafts = None) -> None:
        """Bring a step that was prepared early to the truth, once the step before it is committed.

        Afterwards every tensor equals that of a step prepared now from the same plan, in the same places: positions
        and lengths lose the drafts that were rejected, placeholders become the tokens sampled. ``draft_tokens``:
        the drafts' ids where −1 stood for them, no more than planned. A request that was removed meanwhile keeps its
        place and computes nothing that anyone reads: token 0, positions from 0, slots −1, null blocks.

        Raises PlanError while the step before is not committed, and after `RequestStates.advance` or `commit`.
        """
        from foreword.batch.prepare.resolve import resolved

        self._check_open()
        self._scalars = resolved(self, self._states, self._buffers, self._run, self._gathered, draft_tokens)
        if self._states.checker is not None:
            self._states.checker.check(self)

    @property
    def is_gathered(self) -> bool:
        """Whether the block tables were gathered."""
        return self._gathered

    @property
    def is_committed(self) -> bool:
        """Whether the step's samples were committed."""
        return self._committed

    # -- for commit --------------------------------------------------------------------------------------------

    @property
    def advanced(self) -> bool:
        """Whether the states counted this step as done already."""
        return self._advanced

    @property
    def samples(self) -> Bools:
        """[B] of an advanced step: whether the request's samples count."""
        view: Bools = self._buffers.samples[: self._scalars[0]]
        return view

    def set_samples(self, samples: Bools) -> None:
        """Keep `samples` until the commit."""
        self._buffers.samples[: len(samples)] = samples

    def claim_advance(self, states: RequestStates) -> None:
        """Refuse a second advance, and whatever a commit is refused for."""
        self._check_current(states)
        self._check_open()
        self._advanced = True

    def claim_commit(self, states: RequestStates) -> None:
        """Refuse a second commit, foreign states, moved rows and a step that was not resolved."""
        self._check_current(states)
        self._committed = True

    def _check_open(self) -> None:
        self._alive()
        if self._advanced or self._committed:
            raise PlanError("this batch was advanced or committed before", step=self.step)

    def _check_current(self, states: RequestStates) -> None:
        self._alive()
        if states is not self._states:
            raise PlanError("this batch was prepared from other states", step=self.step)
        if self._layout != states.layout_version:
            raise PlanError("rows moved between prepare_inputs and commit: commit first", step=self.step)
        if self._committed:
            raise PlanError("this batch was committed before", step=self.step)
        if self._scalars[9]:
            raise PlanError("this batch stands on samples not known yet: commit the step before, then resolve this one",
                            step=self.step)  # fmt: skip

    def release_commit(self) -> None:
        """Undo `claim_commit` after a commit that changed nothing."""
        self._committed = False

    def advance_native(self) -> bool:
        """Whether the native core advanced the states; False without it."""
        core = self._buffers.native
        if core is None:
            return False
        core.advance(self._scalars[0])
        return True

    def commit_native(self, sampled: I32) -> bool:
        """Whether the native core applied the samples [B] or [B, width]; False without it, or where it refuses."""
        core = self._buffers.native
        if core is None or len(sampled) != self._scalars[0]:
            return False
        try:
            return bool(core.commit(sampled, self._advanced))
        except TypeError:  # another dtype or layout
            return False

    def __repr__(self) -> str:
        if self._generation != self._buffers.generation:
            return f"<InputBatch of step {self.step}, replaced>"
        return (
            f"<InputBatch of step {self.step}: {self.num_reqs} requests, {self.num_tokens} tokens, "
            f"{self.attention_state.name}>"
        )


def prepare_inputs(
    states: RequestStates,
    plan: PlanLike,
    buffers: InputBuffers,
    *,
    draft_tokens: Drafts = None,
    pad_to: tuple[int | None, int | None] | None = None,
    order: Order = "given",
    backend: Backend = "auto",
    gather_block_tables: bool = True,
    block_ops: BlockOps | None = None,
    check: Check = "off",
) -> InputBatch:
    """Turn the scheduler's choice into the tensors of a step.

    plan: {req_id: tokens to schedule}, or (rows, num_scheduled) int32 [B]. A count includes the row's drafts.
    draft_tokens: {req_id: [ids]}, or with array plans int32 [B, D] padded with −1; drafts take the last positions.
    pad_to: (num_tokens, num_reqs) for a captured graph; None in either place pads nothing there.
    order: "given", or "decode_first": stable by (no drafts, tokens != 1 + max_num_draft_tokens, tokens).
    backend: "auto" is native where it is built, else numpy. All three give equal bits.
    block_ops: blocks to zero and to copy before the step; the batch carries them to whoever runs it.
    gather_block_tables: False leaves `InputBatch.block_table` out, for kernels that read the states' own tables.
    check: "cheap" holds the step's sums and bounds against each other, O(B); "full" proves every tensor and every slot
    read or written, see `foreword.batch.proof.checker`. A batch they refuse must not be run.

    Raises PlanError where a row would read or write what it must not, CapacityError past the buffers, RequestError
    for an unknown id. Nothing is changed when this raises. The state changes only in `RequestStates.commit`.
    """
    if check != "off":
        from foreword.batch.proof.checker import run_check

        batch = prepare_inputs(
            states, plan, buffers, draft_tokens=draft_tokens, pad_to=pad_to, order=order, backend=backend,
            gather_block_tables=gather_block_tables, block_ops=block_ops,
        )  # fmt: skip
        run_check(batch, states, check)
        return batch
    if buffers.states is not states:
        raise PlanError("these buffers were made for other states: use InputBuffers.for_states(states, …)")
    if pad_to is not None:
        _plan.check_padding(pad_to)
    if order == "decode_first" and type(plan) is tuple:
        order = "given" if _plan.is_decode_first(plan[1], draft_tokens, states.max_num_draft_tokens) else order
    if buffers.native is not None and order == "given" and backend in ("auto", "native"):
        # The hot path: arrays in, one native call. It refuses whatever is not in order, and the way below says what.
        scalars = None
        if type(plan) is tuple:
            scalars = _native_arrays(buffers.native, plan, draft_tokens, pad_to, gather_block_tables)
        elif isinstance(plan, PlannedStep) and (draft_tokens is None or draft_tokens is plan.draft_tokens):
            pads = (-1, -1) if pad_to is None else (-1 if p is None else p for p in pad_to)
            scalars = buffers.native.prepare(*plan.plan, *plan.drafts, *pads, gather_block_tables, None)
        if scalars is not None:
            return InputBatch(states, buffers, scalars, None, gather_block_tables, native.run, block_ops)
    wanted = _plan.normalize(states, plan, draft_tokens)
    padded = (None, None) if pad_to is None else pad_to
    if order == "decode_first":
        wanted = _plan.decode_first(wanted, states.max_num_draft_tokens)
    elif order != "given":
        raise PlanError(f"order={order!r}: must be 'given' or 'decode_first'")
    if isinstance(plan, tuple | PlannedStep):
        req_ids = None  # found by row when somebody asks
    else:
        req_ids = list(plan) if order == "given" else states.req_ids_of(wanted.rows)
    run = _backend(backend)
    if run is not native.run:
        _plan.check(states, buffers, wanted, pad_to)
    scalars = run(states, buffers, wanted, padded, gather_block_tables)
    return InputBatch(states, buffers, scalars, req_ids, gather_block_tables, run, block_ops)


def _native_arrays(core: Any, plan: tuple[I32, I32], drafts: Any, pad_to: Any, gather: bool) -> Any:
    pad_tokens, pad_reqs = (-1, -1) if pad_to is None else (-1 if p is None else p for p in pad_to)
    try:
        return core.prepare_arrays(plan[0], plan[1], drafts, pad_tokens, pad_reqs, gather)
    except TypeError:  # other dtypes, layouts or forms of drafts
        return None


def _backend(name: Backend) -> Run:
    match name:
        case "auto":
            return native.run if available() else vectorized.run
        case "native":
            return native.run
        case "numpy":
            return vectorized.run
        case "loops":
            return loops.run
    raise PlanError(f"backend={name!r}: must be 'auto', 'native', 'numpy' or 'loops'")
