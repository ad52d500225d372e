"""A difference applied to another process's states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch.difference.columns import (
    NO_ROWS,
    PROGRESS,
    as_i32,
    checksum_of,
    geometry_of,
)
from foreword.batch.difference.encoding import (
    malformed,
)
from foreword.batch.difference.value import StepDifference
from foreword.batch.prepare.input_batch import InputBatch
from foreword.batch.prepare.prepare import AUTO, BACKENDS
from foreword.batch.state.request_states import RequestStates
from foreword.batch.state.sampling_columns import COLUMNS, Need
from foreword.batch.step.buffers import InputBuffers
from foreword.batch.step.slots import ragged_arange
from foreword.batch.values.block_ops import BlockOps
from foreword.batch.values.integers import INT32_MAX
from foreword.batch.values.plan import Backend, Plan, RaggedDrafts
from foreword.batch.values.requests import NewRequests
from foreword.errors import PlanError


def apply_difference(
    states: RequestStates, difference: StepDifference, buffers: InputBuffers, *, backend: Backend = "auto"
) -> InputBatch:
    """Bring the states to where the recorder's were, and prepare the step: every tensor and column equals the
    recorder's. Differences are applied in the order taken, each once; a snapshot is applied to new states.

    Raises PlanError for states that the difference does not belong to, with nothing changed. PlanError, RequestError or
    CapacityError for values out of range: continue after those with new states and a snapshot.
    """
    if buffers.states is not states:
        raise PlanError("these buffers were made for other states: use InputBuffers.for_states(states, …)")
    if backend != "auto" and backend not in BACKENDS:
        raise PlanError(f"backend={backend!r}: must be 'auto', 'native', 'numpy' or 'loops'")
    _check_base(states, difference)
    step = _Applied(states, difference)
    step.restructure()
    step.write()
    name = AUTO if backend == "auto" else backend
    scalars = BACKENDS[name](states, buffers, step.plan, difference.pad_to, difference.gather)
    before, states._step = states._step, difference.step - 1
    batch = InputBatch(states, buffers, scalars, None, difference.gather, step.ops, name)
    states._step = max(before, difference.step)
    return batch


class _Applied:
    """The arrays of a difference, checked and widened: the construction changes nothing."""

    def __init__(self, states: RequestStates, difference: StepDifference) -> None:
        self.states, self.difference = states, difference
        self.unread = dict(difference.arrays)
        M, V = states.max_model_len, states.vocab_size
        self.low = min(states.null_block, 0)
        self._read_rows()
        self.appended, self.content, self.entries = [], [], []
        for g, table in enumerate(states.block_tables):
            K = table.width
            rows = self._rows(f"content.{g}.rows")
            ids = self._values(f"content.{g}.ids", len(rows), 0, 2**62)
            self.content.append((rows, ids, self._column(f"content.{g}.num_blocks", len(rows), 0, K)))
            rows = self._values(f"entries.{g}.rows", None, 0, states.max_num_reqs - 1)
            index = self._values(f"entries.{g}.index", len(rows), 0, K - 1)
            self.entries.append((rows, index, self._values(f"entries.{g}.blocks", len(rows), self.low, INT32_MAX)))
            rows = self._rows(f"appended.{g}.rows")
            count = self._column(f"appended.{g}.count", len(rows), 1, K)
            blocks = self._values(f"appended.{g}.blocks", int(count.sum()), self.low, INT32_MAX)
            self.appended.append((rows, count, blocks))
        self._read_plan()
        self.changed = self._rows("changed.rows") if "changed.rows" in self.unread else self.plan[0].astype(np.int64)
        self.deltas = {
            name: self._column(f"changed.{name}", len(self.changed), -INT32_MAX, INT32_MAX)
            for name in PROGRESS
            if f"changed.{name}" in self.unread
        }
        rows = self._rows("tokens.rows") if "tokens.rows" in self.unread else self.changed
        rows = rows if "tokens.ids" in self.unread else rows[:0]
        count = self._column("tokens.count", len(rows), 1, M)
        back = self._column("tokens.back", len(rows), 0, M, absent=0)
        self.tokens = rows, back, count, self._values("tokens.ids", int(count.sum()), 0, V - 1)
        self._read_sampling()
        if self.unread:
            raise malformed(next(iter(self.unread)), expected="an array of this format")

    def _read_rows(self) -> None:
        """Removals, moves and admissions."""
        states, difference = self.states, self.difference
        live = self.live = states.live.copy()
        self.removed = self._rows("removed")
        self._require(live[self.removed].all(), "removed", "live rows")
        live[self.removed] = False
        self.source = self._rows("moves.from")
        self.target = self._rows("moves.to", len(self.source))
        self._require(live[self.source].all(), "moves.from", "live rows")
        live[self.source] = False
        self._require(not live[self.target].any(), "moves.to", "free rows")
        live[self.target] = True
        self.added = self._rows("admitted.rows", len(difference.req_ids))
        self._require(not live[self.added].any(), "admitted.rows", "free rows")
        live[self.added] = True
        n, V = len(self.added), states.vocab_size
        num_tokens = self._column("admitted.num_tokens", n, 1, states.max_model_len)
        held = [self._column(f"admitted.num_blocks.{g}", n, 0, t.width) for g, t in enumerate(states.block_tables)]
        self.admitted = NewRequests(
            req_ids=difference.req_ids,
            token_ids=as_i32(self._values("admitted.token_ids", int(num_tokens.sum()), 0, V - 1)),
            num_tokens=as_i32(num_tokens),
            block_ids=[
                as_i32(self._values(f"admitted.block_ids.{g}", int(count.sum()), self.low, INT32_MAX))
                for g, count in enumerate(held)
            ],
            num_blocks=[as_i32(count) for count in held],
            prompt_len=as_i32(self._column("admitted.prompt_len", n, 1, states.max_model_len)),
            num_computed_tokens=as_i32(self._column("admitted.num_computed_tokens", n, 0, states.max_model_len)),
            lora_id=as_i32(self._column("admitted.lora_id", n, 0, INT32_MAX))
            if "admitted.lora_id" in self.unread
            else None,
        )
        self.freed = self._rows("generation.rows")
        self.generations = self._column("generation.values", len(self.freed), 0, 2**62)

    def _read_plan(self) -> None:
        states = self.states
        rows, cancelled, drafts = self._rows("plan.rows"), None, None
        counts = self._column("plan.counts", len(rows), 0, INT32_MAX)
        if "plan.cancelled" in self.unread:
            cancelled = self._values("plan.cancelled", len(rows), 0, 1).astype(np.bool_)
        if "drafts.ids" in self.unread:
            num = self._column("drafts.counts", len(rows), 0, states.max_num_draft_tokens)
            ids = self._values("drafts.ids", int(num.sum()), -1, states.vocab_size - 1)
            drafts = RaggedDrafts(as_i32(num), as_i32(ids))
        self.plan: Plan = as_i32(rows), as_i32(counts), drafts, cancelled
        zero, copies = (self._values(name, None, 0, INT32_MAX) for name in ("ops.zero", "ops.copies"))
        self._require(len(copies) % 2 == 0, "ops.copies", "pairs")
        self.ops = BlockOps(as_i32(zero), as_i32(copies).reshape(-1, 2))

    def _read_sampling(self) -> None:
        self.sampled = self._rows("sampling.rows")
        self.sampling: dict[str, AnyArray] = {}
        for name, (dtype, default) in COLUMNS.items() if len(self.sampled) else ():
            high = 2 * max(Need) - 1 if name == "needs" else 2**63 - 1
            is_float = np.dtype(dtype).kind == "f"
            column = self._column(f"sampling.{name}", len(self.sampled), -(2**63), high, absent=default, float=is_float)
            self.sampling[name] = column.astype(dtype)
        for params in self.difference.params.values():
            params.check(None, self.states.vocab_size)
        sampled = set(self.sampled.tolist())
        self._require(self.live[self.sampled].all(), "sampling.rows", "live rows")
        self._require(sampled.issuperset(self.difference.params), "params", "rows of sampling.rows")
        rows = list(self.difference.staged)
        self._require(all(r < len(self.live) and self.live[r] for r in rows), "staged", "live rows")

    def _require(self, ok: object, name: str, expected: str) -> None:
        if not ok:
            raise malformed(name, expected=expected)

    def _values(
        self, name: str, count: int | None, low: int, high: int, *, shared: bool = False, float: bool = False
    ) -> AnyArray:
        """An array [count] of values in [low, high]; None: of any length."""
        array = self.unread.pop(name, NO_ROWS)
        if array.ndim != 1 or array.dtype.kind not in ("f" if float and len(array) else "iub"):
            raise malformed(name, expected="a flat array of numbers", got=f"{array.dtype} {array.shape}")
        if count is not None and len(array) != count:
            if not shared or len(array) != 1 or not count:
                raise malformed(name, expected=f"{count} entries", got=len(array))
            array = np.repeat(array, count)
        if not float and len(array) and not (low <= int(array.min()) and int(array.max()) <= high):
            raise malformed(name, expected=f"{low} … {high}", got=(int(array.min()), int(array.max())))
        return array if float else array.astype(np.int64)

    def _column(
        self, name: str, count: int, low: int, high: int, *, absent: float | None = None, float: bool = False
    ) -> AnyArray:
        """One value per row, or one for all rows. absent: the value where the array is left out; None: required."""
        if absent is not None and name not in self.unread:
            return np.full(count, absent)
        return self._values(name, count, low, high, shared=True, float=float)

    def _rows(self, name: str, count: int | None = None) -> I64:
        rows = self._values(name, count, 0, self.states.max_num_reqs - 1)
        self._require(len(np.unique(rows)) == len(rows), name, "each row once")
        return rows

    def restructure(self) -> None:
        """Remove, move and admit, in this order."""
        states, extras = self.states, self.difference.extras
        if len(self.removed):
            states.remove_rows(as_i32(self.removed))
        self._move()
        if not len(self.added):
            return
        rows = self.added.tolist()
        free, wanted = states._directory.free, set(rows)
        free[:] = [row for row in free if row not in wanted] + rows[::-1]  # taken from the end
        if not extras:
            states.add_requests(self.admitted)
            return
        for i, request in enumerate(self.admitted.split()):
            states.add_request(replace(request, **extras.get(i, {})))

    def _move(self) -> None:
        """Exchange rows until each request is in its target."""
        row_of = {source: source for source in self.source.tolist()}
        held = dict(row_of)  # row → the source of the request in it
        for source, target in zip(self.source.tolist(), self.target.tolist(), strict=True):
            row = row_of[source]
            if row == target:
                continue
            self.states.swap_rows(row, target)
            displaced = held.pop(target, None)
            del held[row]
            row_of[source], held[target] = target, source
            if displaced is not None:
                row_of[displaced], held[row] = row, displaced

    def write(self) -> None:
        """Blocks, tokens, counts and parameters."""
        states, difference = self.states, self.difference
        states.row_generation[self.freed] = self.generations
        for g, table in enumerate(states.block_tables):
            rows, ids, num_blocks = self.content[g]
            if len(rows):
                at, index, blocks = self.entries[g]
                table.table[at, index] = blocks
                table.num_blocks[rows], table.content_id[rows] = num_blocks, ids
                table.ids.next[0] = max(table.ids.next[0], ids.max() + 1)
            rows, count, blocks = self.appended[g]
            if len(rows):
                start = table.num_blocks[rows]
                self._require((start + count <= table.width).all(), f"appended.{g}", f"{table.width} blocks per row")
                table.table[np.repeat(rows, count), np.repeat(start, count) + ragged_arange(count)] = blocks
                table.num_blocks[rows] += count.astype(np.int32)
        self._write_progress()
        if len(self.sampled):
            sampling, sampled = states.sampling, as_i32(self.sampled)
            sampling.set_columns(sampled, self.sampling)
            sampling.needs[sampled] = self.sampling["needs"]  # those of params among them
            for row in sampled.tolist():
                sampling.params.pop(row, None)
            sampling.params.update(difference.params)
        for row, positions in difference.staged.items():
            states.extras.stage_mrope(row, positions)
        states.sampling.num_admissions, states.sampling.base_seed = difference.num_admissions, difference.base_seed

    def _write_progress(self) -> None:
        states, M = self.states, self.states.max_model_len
        rows, back, count, ids = self.tokens
        if len(rows):
            start = states.num_tokens[rows] - back
            self._require(((start >= 0) & (start + count <= M)).all(), "tokens", f"positions in [0, {M})")
            states.token_ids[np.repeat(rows, count), np.repeat(start, count) + ragged_arange(count)] = ids
        for name, delta in self.deltas.items():
            column = states._columns[name]
            value = column[self.changed] + delta
            ok = (abs(value) <= INT32_MAX) if name == "rope_delta" else (value >= 0) & (value <= 2 * M + 1)
            if name in ("num_tokens", "num_computed_tokens"):
                ok &= value <= M
            self._require(ok.all(), f"changed.{name}", f"values that fit max_model_len = {M}")
            column[self.changed] = value
        for touched in (self.changed, rows) if rows is not self.changed else (rows,):
            known = states.num_tokens[touched]
            last = states.token_ids[touched, np.maximum(known, 1) - 1]
            states.last_sampled_token[touched] = np.where(known > states.prompt_len[touched], last, -1)


def _check_base(states: RequestStates, difference: StepDifference) -> None:
    if difference.base is None:
        if states.sampling.num_admissions or len(states):
            raise PlanError("a snapshot is applied to new states", tensor="base", expected="no admissions",
                            got=states.sampling.num_admissions)  # fmt: skip
        given = difference.geometry or {}
        for name, value in geometry_of(states).items():
            if given.get(name) != value:
                raise PlanError("the states differ from the recorder's", tensor=name, expected=given.get(name),
                                got=value)  # fmt: skip
        return
    progress = np.stack([states._columns[name] for name in PROGRESS])
    got = checksum_of(progress, np.stack([t.num_blocks for t in states.block_tables]))
    if got != difference.base:
        raise PlanError("the difference does not follow these states: apply all of them in order, each once, and "
                        "change the states by differences alone", step=difference.step, tensor="base",
                        expected=difference.base, got=got)  # fmt: skip
