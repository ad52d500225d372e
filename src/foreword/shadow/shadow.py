"""A follower of another engine: it prepares the same decisions again, and compares the tensors with those of the
engine's runner.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch import (
    BlockOps,
    CacheContents,
    GroupUse,
    InputBatch,
    InputBuffers,
    NewRequest,
    RequestStates,
    SlotFault,
    TokenIds,
    prepare_inputs,
)
from foreword.batch.adapters import vllm
from foreword.check_options import LEVELS, Level
from foreword.errors import CapacityError, ConfigError, ForewordError, PlanError, RequestError
from foreword.integers import is_int32
from foreword.shadow.comparison import (
    NAMES,
    PER_GROUP,
    Difference,
    TableRule,
    differences,
    kept_entries,
    on_host,
    read_differences,
    selected,
    slot_differences,
    table_differences,
)
from foreword.shadow.explanation import why
from foreword.shadow.finding import Finding, Origin, in_causal_order
from foreword.shadow.report import Report

_PER_GROUP = re.compile(r"(\w+)\[(\d+)\]")  # a tensor of one KV group in messages


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A scheduled request in the state that its engine has when a step is prepared, for `Shadow.follow`.

    token_ids: all known tokens, of which the first num_prompt_tokens are the prompt; they are read when the request is
    first seen. num_computed_tokens: the number before the step. num_scheduled_tokens: the number in the step.
    block_ids: one list per KV group.
    """

    req_id: str
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[TokenIds]
    lora_id: int = 0


class Shadow:
    """Follows another engine's steps with its own `RequestStates`, and compares every tensor that it is given.

    For each step, in this order: `decide` (or changes of ``states`` and `plan`), `step`, `commit`. None of them raises
    an error for a fault of the engine: the fault becomes a finding, and the next step is followed again.

    states: empty, or as the engine's requests are now (then with ``attached``).
    max_num_batched_tokens: the tokens of the largest step. num_blocks: the blocks of the cache, the null block
    included.
    check: "host" compares values that are on the host already: NumPy arrays, numbers and lists. "tensors" compares all
        values given, as `numpy.asarray` reads them. "full" also follows what every slot of the cache holds.
    every: only each N-th step is compared; the others are followed, and the writes to the cache recorded.
    first: the number of findings that are kept and passed to ``on_finding``; later ones are only counted.
    on_finding: called with each of these findings at the end of `step` or `commit`, causes before their effects; it may
    raise. See `log_finding` and `raise_finding`.
    uses: KV group → how the engine uses its blocks, where the `KVGroup` does not say it.
    tables: the entries of block tables that must be as the scheduler said, besides those that a kernel reads.
    attached: slots that no followed step wrote count as right.
    optimistic: the scheduler counts all drafts of the step before as computed, as with steps in flight: counts above
        the committed ones are not findings.
    """

    def __init__(
        self,
        states: RequestStates,
        *,
        max_num_batched_tokens: int,
        num_blocks: int,
        check: Level = "full",
        every: int = 1,
        first: int = 20,
        on_finding: Callable[[Finding], object] | None = None,
        uses: Mapping[int, GroupUse] | None = None,
        tables: TableRule = TableRule(),  # noqa: B008 (frozen)
        attached: bool = False,
        optimistic: bool = False,
    ) -> None:
        if check not in LEVELS:
            raise ConfigError(f"check={check!r}: must be one of {', '.join(map(repr, LEVELS))}")
        for name, value, low in (("every", every, 1), ("first", first, 0), ("num_blocks", num_blocks, 1)):
            if not is_int32(value, low):
                raise ConfigError(f"{name}={value!r}: must be {low} or more")
        self.states = states
        self.check: Level = check
        self._buffers = InputBuffers.for_states(states, max_num_batched_tokens)
        self._uses = dict(uses or {})
        if unknown := self._uses.keys() - set(range(len(states.block_tables))):
            raise ConfigError(f"uses[{min(unknown)}]: there are {len(states.block_tables)} KV groups, counted from 0")
        self.contents = (
            CacheContents(states, num_blocks, uses=self._uses, attached=attached) if check == "full" else None
        )
        self._tables, self._every, self._first, self._on_finding = tables, every, first, on_finding
        self._optimistic = optimistic
        self._planned: Mapping[str, int] | None = None
        self._drafts: Mapping[str, Sequence[int]] | None = None
        self._ops = BlockOps.NONE
        self._batch: InputBatch | None = None
        self._pending: list[Finding] = []  # findings of the decision, returned with the step
        self._left_out: set[str] = set()  # requests of the step that could not be followed
        self._lost: set[str] = set()  # requests that were left out of a step, as reported
        self._excess: dict[str, int] = {}  # computed tokens by which the scheduler's count is too high, as reported
        self._kept: list[Finding] = []
        self._counts: Counter[str] = Counter()
        self._nanoseconds: Counter[str] = Counter()
        self._num_steps = self._num_compared = self._num_tensors = self._num_refused = 0

    # -- what the scheduler decided ----------------------------------------------------------------------------------

    def decide(self, scheduler_output: Any) -> None:
        """Follow a decision of a vLLM scheduler, before the engine's runner changes the object."""
        started = time.perf_counter_ns()
        self._open()
        self._ops = BlockOps.NONE
        before = self._check_counts(scheduler_output.scheduled_cached_reqs)
        self._lost -= set(scheduler_output.finished_req_ids) if self._lost else set()
        self._planned = dict(scheduler_output.num_scheduled_tokens)
        self._drafts = scheduler_output.scheduled_spec_decode_tokens or None
        try:
            applied = vllm.apply(self.states, scheduler_output, refused=self._note_refused)
            self._planned, self._ops = applied, applied.block_ops
        except ForewordError as error:  # a finding of the output as a whole
            self._pending.append(self._of_error("scheduler_output", error, None))
        if self._optimistic:
            rows, counts = before
            self.states.num_computed_tokens[rows] = np.minimum(self.states.num_computed_tokens[rows], counts)
        self._spent("decide", started)

    def plan(
        self,
        num_scheduled_tokens: Mapping[str, int],
        draft_tokens: Mapping[str, Sequence[int]] | None = None,
        block_ops: BlockOps = BlockOps.NONE,
    ) -> None:
        """Follow any scheduler's decision: the tokens to compute per request, drafts included. Before the call,
        ``states`` must have the decision's arrivals, departures and blocks.
        """
        self._open()
        self._planned, self._drafts, self._ops = dict(num_scheduled_tokens), draft_tokens, block_ops

    def follow(self, requests: Sequence[Scheduled], gone: Collection[str] = ()) -> None:
        """Follow a decision that is given as the engine's own state of each scheduled request, in place of `plan`.

        gone: requests that left or were preempted before the decision. A request that is seen for the first time is
        admitted; later its tokens are the committed ones. A request with fewer computed tokens than its steps have
        computed is computed again from there; one with more is a finding.
        """
        started = time.perf_counter_ns()
        self._open()
        for req_id in gone:
            self.states.remove_request(req_id)
            self._excess.pop(req_id, None)
            self._lost.discard(req_id)
        for request in requests:
            try:
                self._enter(request)
            except ForewordError as error:
                self._note_refused(request.req_id, error)
        self._planned = {request.req_id: request.num_scheduled_tokens for request in requests}
        self._drafts, self._ops = None, BlockOps.NONE
        self._spent("decide", started)

    def _enter(self, request: Scheduled) -> None:
        """Update a request to the engine's state: admit it, append its new blocks, or replace its blocks."""
        states, req_id, told = self.states, request.req_id, request.num_computed_tokens
        if req_id not in states:
            end = request.num_prompt_tokens
            prompt, outputs = request.token_ids[:end], request.token_ids[end:]
            states.add_request(NewRequest(req_id, prompt, request.block_ids, outputs, told, lora_id=request.lora_id))
            return
        row = states.row_of(req_id)
        computed = int(states.num_computed_tokens[row])
        self._check_count(req_id, row, told, computed)
        held = [table.table[row, : table.num_blocks[row]] for table in states.block_tables]
        same = all(
            np.array_equal(have[: len(ids)], ids[: len(have)])
            for have, ids in zip(held, request.block_ids, strict=True)
        )
        if same and told == computed:
            new = [ids[len(have) :] for have, ids in zip(held, request.block_ids, strict=True)]
            if any(len(ids) for ids in new):
                states.append_blocks(req_id, new)
        else:
            states.rewrite(req_id, states.token_ids[row, : states.num_tokens[row]].copy(), told, request.block_ids)

    def _open(self) -> None:
        """Begin a step. The step before, if it was not committed, sampled nothing."""
        if self._batch is not None or self._planned:
            self._close({})
        self._num_steps += 1
        self._pending = []

    def _note_refused(self, req_id: str, error: ForewordError) -> None:
        if req_id not in self._lost:
            self._lost.add(req_id)
            self._pending.append(self._of_error("scheduler_output", error, req_id))

    def _check_counts(self, cached: Any) -> tuple[I64, I32]:
        """Add a finding where the scheduler counts more computed tokens than steps have computed. Return rows and their
        counts.
        """
        states, ids, told = self.states, cached.req_ids, cached.num_computed_tokens
        if len(ids) != len(told) or cached.resumed_req_ids or not all(map(states.__contains__, ids)):
            resumed = cached.resumed_req_ids
            kept = [i for i, rid in enumerate(ids[: len(told)]) if rid in states and rid not in resumed]
            ids, told = [ids[i] for i in kept], [told[i] for i in kept]
        rows = np.fromiter(map(states.row_of, ids), np.int64, len(ids))
        counts, ours = np.array(told, np.int64), states.num_computed_tokens[rows]
        if not self._optimistic and (self._excess or (counts > ours).any()):
            for req_id, row, count, computed in zip(ids, rows.tolist(), counts.tolist(), ours.tolist(), strict=True):
                self._check_count(req_id, row, count, computed)
        return rows, ours

    def _check_count(self, req_id: str, row: int, told: int, computed: int) -> None:
        excess = told - computed
        if excess <= 0:
            self._excess.pop(req_id, None)
            return
        if self._excess.get(req_id) == excess:
            return  # the same fault in a later step
        self._excess[req_id] = excess
        known = int(self.states.num_tokens[row])
        text = f"the scheduler counts {told} tokens computed; {computed} are computed and {known} are known"
        self._pending.append(
            Finding(self._num_steps, "num_computed_tokens", None, (), req_id, computed, told, 1, "scheduler", text)
        )

    # -- what the runner made of it ----------------------------------------------------------------------------------

    def step(self, req_ids: Sequence[str], tensors: Mapping[str, Any]) -> list[Finding]:
        """Prepare the step again in the engine's own order, and return the findings, causes first.

        req_ids: the requests of the batch, in the engine's order. tensors: the engine's tensors by Foreword's names,
        see `comparison.NAMES`. A tensor that exists per KV group is a list with one per group, None for a group that
        has none. ``block_table`` may have any width; arrays may have entries past the step's, which must be padding.
        Masked entries of a masked array are not compared. Raise PlanError for an unknown name, and if neither `decide`
        nor `plan` was called before.

        A request whose decision cannot be followed is left out, and the others are compared.
        """
        if self._planned is None:
            raise PlanError("no decision is known for this step: call decide or plan first", step=self._num_steps + 1)
        if unknown := tensors.keys() - NAMES:
            raise PlanError(
                "no tensor of this name can be compared", tensor=min(unknown), expected=f"one of {sorted(NAMES)}"
            )
        found, self._pending = self._pending, []
        started = time.perf_counter_ns()
        planned = self._in_order(self._planned, list(req_ids), found)
        batch = self._prepare(planned, found)
        started = self._spent("prepare", started)
        if batch is not None and len(self._left_out):
            kept = kept_entries(planned, self._drafts or {}, self._left_out)
            self._forget(selected({"slot_mapping": tensors.get("slot_mapping")}, {"T": ~kept["T"]}))
            tensors = selected(tensors, kept)
        compare = batch is not None and self.will_compare
        if batch is not None and compare:
            self._num_compared += 1
            for name, got in tensors.items():
                if self.check != "host" or on_host(got):
                    found += self._compare(batch, name, got)
        started = self._spent("compare", started)
        if batch is None:
            self._forget(tensors)
        elif self.contents is not None:
            faults = self.contents.check(batch, tensors.get("slot_mapping"), tensors.get("block_table"), read=compare)
            found += [self._of_fault(batch, fault) for fault in faults]
        self._spent("slots", started)
        self._batch = batch
        return self._report(found)

    @property
    def will_compare(self) -> bool:
        """Return whether the step that was decided last is compared; otherwise it is followed without tensors."""
        return (self._num_steps - 1) % self._every == 0

    def _in_order(self, planned: Mapping[str, int], order: list[str], found: list[Finding]) -> Mapping[str, int]:
        """Return the plan in the engine's order; in the scheduler's order, with a finding, where the batch has other
        requests.
        """
        if order == list(planned):
            return planned
        if len(order) == len(planned) and planned.keys() == set(order):
            return planned.in_order(order) if isinstance(planned, vllm.AppliedStep) else {r: planned[r] for r in order}
        missing, extra = sorted(planned.keys() - set(order)), sorted(set(order) - planned.keys())
        text = f"scheduled, and not in the batch: {missing}; in the batch, and not scheduled: {extra}"
        one = next(iter(missing or extra), None)
        found.append(Finding(self._num_steps, "req_ids", None, (), one, list(planned), order, 1, "runner", text))
        return planned

    def _prepare(self, planned: Mapping[str, int], found: list[Finding]) -> InputBatch | None:
        """Return the step's batch without the requests that cannot be followed; None if no batch can be prepared."""
        drafts, order = self._drafts, planned
        self._left_out = set[str]()
        for g, use in self._uses.items():
            if use.ring is not None:
                self._extend(g, use.ring, planned)
        while True:
            try:
                batch = prepare_inputs(self.states, planned, self._buffers, draft_tokens=drafts, block_ops=self._ops)
            except ForewordError as error:
                finding = self._of_error("plan", error, None)
            else:
                if self._lost and not self._left_out:
                    self._lost -= set(planned)
                return batch
            rid = finding.request
            if rid is None or rid not in planned:
                self._num_refused += 1
                found.append(finding)
                return None
            if rid not in self._lost:
                self._lost.add(rid)
                found.append(replace(finding, index=(list(order).index(rid),)))
            self._left_out.add(rid)
            planned = {other: count for other, count in planned.items() if other != rid}
            drafts = {other: ids for other, ids in (drafts or {}).items() if other != rid} or None

    def _extend(self, g: int, ring: int, planned: Mapping[str, int]) -> None:
        """Repeat the blocks of a ring, so that every position has an entry."""
        states = self.states
        table = states.block_tables[g]
        most = -(-ring // table.group.block_size)
        for req_id, count in planned.items():
            if req_id not in states:
                continue
            row = states.row_of(req_id)
            held, end = int(table.num_blocks[row]), int(states.num_computed_tokens[row]) + count
            need = min(-(-end // table.tokens_per_block), table.width)
            if most <= held < need:
                blocks: list[list[int]] = [[] for _ in states.block_tables]
                blocks[g] = [int(table.table[row, k % most]) for k in range(held, need)]
                states.append_blocks(req_id, blocks)

    def _forget(self, tensors: Mapping[str, Any]) -> None:
        """Let slots that were written by requests that are not followed count as right."""
        slots = tensors.get("slot_mapping")
        if self.contents is not None and slots is not None:
            self.contents.forget(slots)

    def _compare(self, batch: InputBatch, name: str, got: Any) -> list[Finding]:
        if name == "req_ids":
            return []  # they are the order of the step itself
        if name not in PER_GROUP:
            self._num_tensors += 1
            return [self._of_difference(batch, name, None, d) for d in differences(batch, name, got)]
        found = []
        for g, part in enumerate(got):
            if part is None:
                continue
            self._num_tensors += 1
            use = self._uses.get(g, GroupUse())
            if name == "block_table":
                differ = table_differences(batch, g, use, self._tables, part)
            elif name == "slot_mapping":
                differ = slot_differences(batch, g, use, part)
            else:
                differ = read_differences(batch, g, use, part)
            found += [self._of_difference(batch, name, g, d) for d in differ]
        return found

    # -- findings ------------------------------------------------------------------------------------------------------

    def _of_difference(self, batch: InputBatch, name: str, group: int | None, d: Difference) -> Finding:
        request = None if d.request is None else batch.req_ids[d.request]
        text = why(batch, name, group, d)
        return Finding(self._num_steps, name, group, d.index, request, d.expected, d.got, d.count, "runner", text)

    def _of_fault(self, batch: InputBatch, fault: SlotFault) -> Finding:
        request = batch.req_ids[fault.request]
        if fault.writer is None:
            got = "nothing that was ever written"
        elif fault.is_written:
            got = f"what request {fault.writer!r} writes there in the same step"
        else:
            got = f"what request {fault.writer!r} wrote"
        origin: Origin = "runner" if fault.is_stray else "scheduler"
        expected = f"the key of position {fault.position}"
        text = f"slot {fault.slot} is reached through entry {fault.entry} of the request's blocks"
        return Finding(
            self._num_steps, "cache", fault.group, (fault.request, fault.entry), request, expected, got, fault.count,
            origin, text,
        )  # fmt: skip

    def _of_error(self, tensor: str, error: ForewordError, req_id: str | None) -> Finding:
        index: object = None
        expected: object = None
        got: object = None
        if isinstance(error, PlanError | CapacityError):
            req_id, index, expected, got = error.request or req_id, error.index, error.expected, error.got
            tensor = error.tensor or tensor
        elif isinstance(error, RequestError):
            req_id, expected, got, tensor = error.request_id or req_id, error.reason, error.value, error.field
        at = index if isinstance(index, tuple) else () if index is None else (index,)
        group = None
        if (per_group := _PER_GROUP.fullmatch(tensor)) is not None:
            tensor, group = per_group[1], int(per_group[2])
        return Finding(self._num_steps, tensor, group, at, req_id, expected, got, 1, "scheduler", str(error))

    def _report(self, found: list[Finding]) -> list[Finding]:
        """Return the findings in their order. Keep the first ones, and pass them to ``on_finding``."""
        if not found:
            return found
        found = in_causal_order(found)
        self._counts.update(finding.tensor for finding in found)
        new = found[: max(self._first - len(self._kept), 0)]
        self._kept += new
        if self._on_finding is not None:
            for finding in new:
                self._on_finding(finding)
        return found

    # -- what was sampled ----------------------------------------------------------------------------------------------

    def commit(self, sampled: Mapping[str, Sequence[int]]) -> list[Finding]:
        """Follow the samples of the step: {req_id: tokens}; requests that sampled nothing may be left out."""
        started = time.perf_counter_ns()
        found = self._pending + self._close(sampled)
        self._pending = []
        self._spent("commit", started)
        return self._report(found)

    def _close(self, sampled: Mapping[str, Sequence[int]]) -> list[Finding]:
        batch, planned, left_out = self._batch, self._planned or {}, self._left_out
        self._batch = self._planned = None
        found = []
        if batch is not None:
            followed = {r: ids for r, ids in sampled.items() if r not in left_out} if left_out else sampled
            try:
                self.states.commit(batch, followed)
                planned = {rid: planned[rid] for rid in left_out}
            except ForewordError as error:  # nothing was committed
                found.append(self._of_error("sampled", error, None))
        return found + self._advance(planned, sampled)

    def _advance(self, planned: Mapping[str, int], sampled: Mapping[str, Sequence[int]]) -> list[Finding]:
        """Count a step that could not be prepared, so that the next one can be."""
        states, drafts, found = self.states, self._drafts or {}, list[Finding]()
        for req_id, scheduled in planned.items():
            if req_id not in states:
                continue
            row = states.row_of(req_id)
            known, computed = int(states.num_tokens[row]), int(states.num_computed_tokens[row])
            end, tokens = computed + scheduled - len(drafts.get(req_id, ())), list(sampled.get(req_id, ()))
            if end < known:
                tokens = []  # a prompt chunk
            computed = min(end + max(len(tokens) - 1, 0), known + len(tokens) - 1)
            try:
                states.rewrite(req_id, [*states.token_ids[row, :known].tolist(), *tokens], computed)
            except ForewordError as error:
                found.append(self._of_error("sampled", error, req_id))
        return found

    def resync(
        self,
        req_id: str,
        token_ids: TokenIds,
        num_computed_tokens: int,
        block_ids: Sequence[TokenIds] | None = None,
        *,
        lora_id: int = 0,
    ) -> None:
        """Take over the engine's own state of a request: its known tokens, the number of computed ones, and its blocks
        per KV group; None keeps the known blocks. An unknown request is admitted, with its adapter. Raise RequestError
        for values that do not fit.
        """
        if req_id in self.states:
            self.states.rewrite(req_id, token_ids, num_computed_tokens, block_ids)
        else:
            blocks = [[] for _ in self.states.block_tables] if block_ids is None else block_ids
            request = NewRequest(req_id, token_ids, blocks, num_computed_tokens=num_computed_tokens, lora_id=lora_id)
            self.states.add_request(request)
        self._excess.pop(req_id, None)
        self._lost.discard(req_id)

    def salt(self, req_id: str, salt: str) -> None:
        """Declare that a request shares no cached content with requests of another salt."""
        if self.contents is not None:
            self.contents.salt(req_id, salt)

    def add(self, finding: Finding) -> None:
        """Add a finding of the caller to the step that was decided last; `step` or `commit` returns it."""
        self._pending.append(finding)

    # -- the result -----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """The number of steps that were followed, which is the number of the last one."""
        return self._num_steps

    @property
    def batch(self) -> InputBatch | None:
        """The last step as defined, until its commit; None if it could not be prepared."""
        return self._batch

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The first findings."""
        return tuple(self._kept)

    def report(self) -> Report:
        """Return the numbers of steps and the findings so far."""
        steps = max(self._num_steps, 1) * 1000
        microseconds = {phase: spent / steps for phase, spent in self._nanoseconds.items()}
        return Report(
            self._num_steps, self._num_compared, self._num_tensors, self._num_refused, self.findings,
            dict(self._counts), microseconds,
        )  # fmt: skip

    def close(self) -> None:
        """Stop following the states."""
        if self.contents is not None:
            self.contents.close()

    def _spent(self, phase: str, started: int) -> int:
        now = time.perf_counter_ns()
        self._nanoseconds[phase] += now - started
        return now
