"""Random traffic: every tensor of every step, on all three backends, against an independent model.

The same traffic is drawn twice: by a state machine that shrinks what fails, and by seeds, which reach further in less
time. FOREWORD_EXAMPLES=2000 runs that many other traces of both kinds, and of the lives of ``test_difference.py``.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from batch_model import FREE, Group, Model, Request, Scheduled
from batch_rig import BACKENDS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foreword.batch import (
    CapacityError,
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    advance,
    discard_mask,
    kernel_block_table,
    prepare_inputs,
    resolve,
    validate,
)
from foreword.batch.proof.spec import TENSORS, Level

VOCAB = 61
EXAMPLES = os.environ.get("FOREWORD_EXAMPLES")

# tensor → the scalar that gives the length of its view; the buffer behind it is compared to its end
PADDED_TO_THE_END = {
    "seq_lens": "num_reqs_padded",
    "block_table": "num_reqs_padded",
    "dcp_local_seq_lens": "num_reqs_padded",
    "positions": "num_tokens_padded",
    "input_ids": "num_tokens_padded",
    "slot_mapping": "num_tokens_padded",
    "idx_mapping": "num_reqs",
    "num_computed_tokens": "num_reqs",
    "is_prefilling": "num_reqs",
    "logits_indices": "num_logits",
    "expanded_idx_mapping": "num_logits",
}

T = TypeVar("T")


class Picks:
    """Makes every random choice of the traffic with one source of integers."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def flag(self, chance: int = 2) -> bool:
        """True once in ``chance``."""
        return self.integer(1, chance) == chance

    def tokens(self, count: int, low: int = 0) -> list[int]:
        return [self.integer(low, VOCAB - 1) for _ in range(count)]

    def order(self, values: Sequence[T]) -> list[T]:
        left = list(values)
        return [left.pop(self.integer(0, len(left) - 1)) for _ in values]


@dataclass
class Step:
    """A step of the model, and the batch of each of the states."""

    scheduled: list[Scheduled]
    batches: list[InputBatch]
    pads: tuple[int | None, int | None]


class Lives:
    """Makes the same calls on three states, each with its own backend, and on the model.

    in_flight: whether a step may be prepared before the samples of the step before it are known.
    """

    def __init__(self, model: Model, max_tokens: int, first_block: int = 1, in_flight: bool = False) -> None:
        self.model, self.max_tokens, self.in_flight = model, max_tokens, in_flight
        self.states = [
            RequestStates(
                max_num_reqs=model.max_num_reqs,
                max_model_len=model.max_model_len,
                vocab_size=VOCAB,
                kv_groups=[
                    KVGroup(
                        g.block_size,
                        sliding_window=g.window,
                        kernel_block_size=g.kernel_block_size,
                        context_parallel=g.ranks is not None,
                        recurrent=g.state_of is not None,
                    )
                    for g in model.groups
                ],
                max_num_draft_tokens=model.max_drafts,
                context_parallel=ContextParallel(*model.ranks) if model.ranks else None,
                null_block=model.null,
            )
            for _ in BACKENDS
        ]
        self.buffers = [
            [InputBuffers.for_states(states, max_tokens) for states in self.states] for _ in range(1 + in_flight)
        ]
        self.next_block = first_block + model.null
        self.serial = 0
        self.ahead: Step | None = None  # prepared before the samples of the step before it are known
        self.preempted: list[tuple[list[int], list[int]]] = []

    # -- what a cache and a scheduler would do -------------------------------------------------------------------

    def new_blocks(self, count: int) -> list[int]:
        first, self.next_block = self.next_block, self.next_block + count
        return list(range(first, first + count))

    def length(self, pick: Picks, up_to: int) -> int:
        """A boundary that a length can fall on or next to."""
        M = self.model.max_model_len
        sizes = {1, M - 1, M, up_to}
        for group in self.model.groups:
            for blocks in (1, 2, 3):
                sizes |= {blocks * group.span - 1, blocks * group.span, blocks * group.span + 1}
        return pick.one_of(sorted(n for n in sizes if 1 <= n <= up_to))

    def blocks_of(self, pick: Picks, g: int, computed: int) -> list[int]:
        """New blocks, some shared with another request, some null below the window."""
        group = self.model.groups[g]
        ids = self.new_blocks(pick.integer(-(-computed // group.span), self.model.width(g)))
        others = [r.blocks[g] for r in self.model.requests.values()]
        if computed and others and pick.flag():
            shared = pick.one_of(others)[: computed // group.span]
            ids[: len(shared)] = shared
        if group.window is not None and pick.flag():
            below = max(computed - group.window + 1, 0) // group.span
            ids[:below] = [self.model.null] * below
        return ids

    def admit(self, pick: Picks, prompt: list[int], outputs: list[int]) -> None:
        known = len(prompt) + len(outputs)
        computed = 0 if pick.flag() else min(self.length(pick, known), known - 1)
        blocks = [self.blocks_of(pick, g, computed) for g in range(len(self.model.groups))]
        self.serial += 1
        rid = f"r{self.serial}"
        request = NewRequest(rid, prompt, blocks, output_token_ids=outputs, num_computed_tokens=computed)
        if len(self.model.requests) == self.model.max_num_reqs:
            for states in self.states:
                with pytest.raises(CapacityError):
                    states.add_request(request)
            return
        rows = {states.add_request(request) for states in self.states}
        assert len(rows) == 1
        self.model.requests[rid] = Request(
            rows.pop(), list(prompt), list(outputs), computed, [list(b) for b in blocks], known, self.serial
        )

    def arrive(self, pick: Picks) -> None:
        length = self.length(pick, self.model.max_model_len)
        tokens = pick.tokens(length)
        cut = length if pick.flag() else self.length(pick, length)
        self.admit(pick, tokens[:cut], tokens[cut:])

    def remove(self, rid: str) -> Request:
        assert all(states.remove_request(rid) for states in self.states)
        return self.model.requests.pop(rid)

    def leave(self, pick: Picks) -> None:
        self.remove(pick.one_of(sorted(self.model.requests)))

    def preempt(self, pick: Picks) -> None:
        gone = self.remove(pick.one_of(sorted(self.model.requests)))
        self.preempted.append((gone.prompt, gone.outputs))

    def resume(self, pick: Picks) -> None:
        self.admit(pick, *self.preempted.pop())

    def condense(self) -> None:
        moves = [states.condense() for states in self.states]
        assert moves[0] == moves[1] == moves[2]
        rows = {r.row: r for r in self.model.requests.values()}
        for source, target in moves[0]:
            rows[target] = rows.pop(source)
            rows[target].row = target
        assert sorted(rows) == list(range(len(rows)))

    def swap(self, pick: Picks) -> None:
        first, second = (pick.integer(0, self.model.max_num_reqs - 1) for _ in range(2))
        for states in self.states:
            states.swap_rows(first, second)
        for request in self.model.requests.values():
            request.row = {first: second, second: first}.get(request.row, request.row)

    # -- a step --------------------------------------------------------------------------------------------------

    def choose(self, pick: Picks) -> list[tuple[str, int, list[int]]]:
        """Requests in any order, as many tokens each as may be: a chunk, the rest, or the rest and drafts."""
        left, wanted = self.max_tokens, []
        for rid in pick.order(sorted(self.model.requests)):
            request = self.model.requests[rid]
            known = len(request.tokens) + request.in_flight
            rest = known - request.computed
            if not rest or known > self.model.max_model_len or not left or pick.flag(6):
                continue
            num = min(rest if pick.flag() else self.length(pick, rest), left)
            room = min(self.model.max_drafts, self.model.max_model_len - known, left - num)
            drafts = pick.tokens(pick.integer(0, room), low=-1) if num == rest and room > 0 else []
            wanted.append((rid, num + len(drafts), drafts))
            left -= num + len(drafts)
        return wanted

    def grow(self, pick: Picks, wanted: list[tuple[str, int, list[int]]]) -> None:
        """Append what the step needs: list by list, or one block for many rows."""
        for g, group in enumerate(self.model.groups):
            single = []
            for rid, num, _ in wanted:
                request = self.model.requests[rid]
                missing = -(-(request.computed + num) // group.span) - len(request.blocks[g])
                if missing == 1 and pick.flag():
                    single.append(request)
                elif missing > 0:
                    self.append(rid, g, missing)
            if single:
                ids = self.new_blocks(len(single))
                rows = np.array([r.row for r in single], np.int32)
                for states in self.states:
                    states.append_blocks_rows(rows, np.array(ids, np.int32), group=g)
                for request, block in zip(single, ids, strict=True):
                    request.blocks[g].append(block)

    def append(self, rid: str, g: int, count: int) -> None:
        ids = self.new_blocks(count)
        self.model.requests[rid].blocks[g] += ids
        for states in self.states:
            states.append_blocks(rid, [ids if i == g else [] for i in range(len(self.model.groups))])

    def step(self, pick: Picks) -> None:
        if self.ahead is None:
            for rid, request in list(self.model.requests.items()):
                if request.computed == len(request.tokens):  # ended: nothing was sampled after its last token
                    self.remove(rid)
            step = self.prepare(pick)
            self.compare(step, pick)
        else:
            step, self.ahead = self.ahead, None
        self.check_discarded(step)
        if self.in_flight and pick.flag() and all(self.leaves_room(s) for s in step.scheduled):
            for states, batch in zip(self.states, step.batches, strict=True):
                advance(states, batch)
            self.model.advance(step.scheduled)
            self.check()
            self.ahead = self.prepare(pick)
            self.check_discarded(self.ahead)
        for s in step.scheduled:
            if not self.model.is_gone(s):
                self.meanwhile(pick, s)
        if self.ahead is None:
            self.check_discarded(step)
        self.commit(pick, step)
        self.check()
        if self.ahead is not None:
            self.resolve(pick, self.ahead)
            self.compare(self.ahead, pick)

    def leaves_room(self, s: Scheduled) -> bool:
        """Return whether the request can be as long as if all its drafts were accepted."""
        return len(s.request.tokens) + 1 + len(s.drafts) <= self.model.max_model_len

    def prepare(self, pick: Picks) -> Step:
        wanted = self.choose(pick)
        self.grow(pick, wanted)
        total = sum(num for _, num, _ in wanted)
        pads = (
            pick.integer(total, self.max_tokens) if pick.flag() else None,
            pick.integer(len(wanted), self.model.max_num_reqs) if pick.flag() else None,
        )
        order, gather = pick.one_of(["given", "decode_first"]), not pick.flag(4)
        plan, drafts = self.forms(pick, wanted)
        self.buffers.reverse()
        batches = [
            prepare_inputs(
                states, plan, buffers, draft_tokens=drafts, pad_to=None if pads == (None, None) else pads,
                order=order, backend=backend, gather_block_tables=gather,
            )
            for states, buffers, backend in zip(self.states, self.buffers[0], BACKENDS, strict=True)
        ]  # fmt: skip
        scheduled = self.model.plan(wanted, order)
        for batch in batches:
            assert batch.req_ids == [s.rid for s in scheduled]  # read before a request may leave
        return Step(scheduled, batches, pads)

    def resolve(self, pick: Picks, step: Step) -> None:
        """Resolve a step, with the ids of drafts that were planned without."""
        drafts = {}
        for s in step.scheduled:
            if -1 in s.drafts and (new := pick.tokens(pick.integer(0, len(s.drafts)))):
                drafts[s.rid] = new
                s.drafts = new + [-1] * (len(s.drafts) - len(new))
        self.model.resolve(step.scheduled)
        for batch in step.batches:
            resolve(batch, drafts or None)

    def compare(self, step: Step, pick: Picks) -> None:
        expected = self.model.tensors(step.scheduled, *step.pads, self.max_tokens)
        for batch, backend in zip(step.batches, BACKENDS, strict=True):
            compare(batch, expected, backend)
            if batch.is_gathered:
                compare_pages(batch, self.model, step.scheduled)
        if pick.flag(4):
            validate(step.batches[2])

    def check_discarded(self, step: Step) -> None:
        for batch in step.batches:
            assert discard_mask(batch).tolist() == self.model.discarded(step.scheduled, batch.num_reqs_padded)

    def forms(self, pick: Picks, wanted: list[tuple[str, int, list[int]]]) -> tuple:
        """The plan by request id, or as arrays."""
        if pick.flag() or any(d == -1 for _, _, ids in wanted for d in ids):
            return {rid: num for rid, num, _ in wanted}, {rid: ids for rid, _, ids in wanted if ids} or None
        rows = np.array([self.model.requests[rid].row for rid, _, _ in wanted], np.int32)
        width = max((len(ids) for _, _, ids in wanted), default=0)
        table = np.array([ids + [-1] * (width - len(ids)) for _, _, ids in wanted], np.int32)
        return (rows, np.array([num for _, num, _ in wanted], np.int32)), table if width else None

    def meanwhile(self, pick: Picks, s: Scheduled) -> None:
        """While the step runs, a request leaves, another one takes its row, or blocks are appended."""
        match pick.integer(0, 19):
            case 0:
                self.remove(s.rid)
            case 1:
                self.remove(s.rid)
                self.admit(pick, pick.tokens(1), [])
            case 2 if len(s.request.blocks[0]) < self.model.width(0):
                self.append(s.rid, 0, 1)

    def commit(self, pick: Picks, step: Step) -> None:
        sampled = {}
        waited_for = {s.rid for s in self.ahead.scheduled} if self.ahead else set()
        for s in step.scheduled:
            most = 1
            if self.model.samples_of(s):
                most = min(len(s.drafts) + 1, self.model.max_model_len - len(s.request.tokens))
            none = most and s.rid not in waited_for and pick.flag(12)
            sampled[s.rid] = pick.tokens(0 if none else pick.integer(min(most, 1), most))
        given: object
        match pick.integer(0, 2):
            case 0:
                given = sampled
            case 1:
                given = {rid: ids for rid, ids in sampled.items() if ids}
            case _:
                width = max([1, *(len(ids) for ids in sampled.values())])
                rows = [sampled[s.rid] + [-1] * (width - len(sampled[s.rid])) for s in step.scheduled]
                given = np.array(rows, np.int32).reshape(len(rows), width)
                given = given[:, 0] if width == 1 and pick.flag() else given
        for states, batch in zip(self.states, step.batches, strict=True):
            states.commit(batch, given)
            with pytest.raises(PlanError):
                states.commit(batch, given)
        self.model.commit(step.scheduled, sampled)

    def check(self) -> None:
        """The states are the model's."""
        for states in self.states:
            assert set(states.req_ids) == set(self.model.requests)
            for name, column in self.model.state().items():
                expected = np.full(self.model.max_num_reqs, FREE.get(name, 0))
                expected[list(column)] = list(column.values())
                assert np.array_equal(getattr(states, name), expected), name
            for rid, request in self.model.requests.items():
                assert states.row_of(rid) == request.row
                assert states.token_ids[request.row, : len(request.tokens)].tolist() == request.tokens
            for g, table in enumerate(states.block_tables):
                expected = np.full_like(table.table, self.model.null)
                for request in self.model.requests.values():
                    expected[request.row, : len(request.blocks[g])] = request.blocks[g]
                assert np.array_equal(table.table, expected)


def random_lives(pick: Picks, in_flight: bool) -> Lives:
    first_block = pick.one_of([1, 1, 2**30])
    max_model_len = pick.one_of([1, 2, 5, 7, 12, 13, 17, 33])
    ranks = pick.one_of([None, None, (2, 0, 1), (2, 1, 2), (3, 1, 1), (3, 2, 2)])
    groups = []
    for _ in range(pick.integer(1, 3)):
        size, window = pick.one_of([1, 2, 3, 4, 6, 16]), pick.one_of([None, None, 1, 2, 3, 5])
        spread = ranks is not None and size % ranks[2] == 0 and pick.flag()
        fitting = [n for n in (1, 2, 3) if size % n == 0 and first_block == 1]  # kernel blocks have int32 numbers
        kernel = pick.one_of([None, *fitting])
        groups.append(Group(size, window, ranks if spread else None, kernel_block_size=kernel))
    if pick.flag(6):
        groups.append(Group(1, state_of=max_model_len))
    model = Model(
        max_num_reqs=pick.one_of([1, 2, 4, 5, 6]),
        max_model_len=max_model_len,
        groups=groups,
        max_drafts=pick.one_of([0, 1, 3]),
        ranks=ranks,
        null=pick.one_of([0, -1]),
    )
    return Lives(model, pick.one_of([1, 9, 24, 40, 60]), first_block, in_flight)


def compare(batch: InputBatch, expected: dict, backend: str) -> None:
    """The batch's own views, and the buffers' memory to its end."""
    explained = {}
    for name, want in expected.items():
        base, _, rest = name.partition("[")
        g = int(rest[:-1]) if rest else 0
        if base == "block_table" and not batch.is_gathered:
            continue
        if base == "attention_state":
            got = batch.attention_state.name
        elif base == "attention_mask":
            got = batch.attention_mask(g)
            assert (got is None) == (want is None)
        elif base in ("token_indices", "block_table_indices", "block_numbers"):
            if g not in explained:
                explained[g] = batch.explain(g)
            got = getattr(explained[g], base)
        elif base in PADDED_TO_THE_END:
            got, view = batch.buffers[base], getattr(batch, base)
            got, view = (got[g], view[g]) if isinstance(got, tuple) else (got, view)
            lengths = {**expected, "num_logits": len(expected["expanded_local_pos"])}
            assert np.array_equal(view, got[: lengths[PADDED_TO_THE_END[base]]]), (backend, name)
        else:
            got = getattr(batch, base)
        if want is None:
            continue
        want = np.array(want).reshape(np.shape(got)) if np.size(got) == 0 else np.array(want)
        assert np.array_equal(got, want), f"{backend}: {name}: expected {want.tolist()}, got {np.asarray(got).tolist()}"


def compare_pages(batch: InputBatch, model: Model, step: list[Scheduled]) -> None:
    """The forms of a block table: kernel blocks, and the pages of the keys that this rank holds."""
    for g, group in enumerate(model.groups):
        if group.state_of is not None:
            continue
        kernel = [model.kernel_row(g, s) for s in step]
        table = kernel_block_table(batch, g)
        assert table[: len(step)].tolist() == kernel
        assert (table[len(step) :] == model.null).all()
        flash, plan = batch.to_flash_attn(g), batch.to_flashinfer(g)
        keys, pages = [group.local(s.computed + s.num) for s in step], [model.pages(g, s) for s in step]
        assert np.diff(flash.cu_seqlens_k).tolist() == keys
        held = [0 if s.is_cancelled else len(s.request.blocks[g]) for s in step]
        rows = [model.block_row(g, s)[:n] + [-1] * (max(held) - n) for s, n in zip(step, held, strict=True)]
        assert flash.block_table.tolist() == rows
        # A null page below the window is any page that exists: block 0.
        assert plan.kv_indices.tolist() == [max(block, 0) for row in pages for block in row]
        assert np.diff(plan.kv_indptr).tolist() == [len(row) for row in pages]
        assert plan.kv_last_page_len.tolist() == [
            n - group.block_size * max(len(row) - 1, 0) for n, row in zip(keys, pages, strict=True)
        ]


def test_the_model_has_every_tensor_of_a_step():
    model = Model(max_num_reqs=1, max_model_len=4, groups=[Group(2, None, None)], max_drafts=0, ranks=(2, 0, 1))
    names = {name.partition("[")[0] for name in model.tensors([], None, None, 4)}
    # These have tests of their own.
    elsewhere = {"num_placeholders", "row_generation", "num_blocks", "block_offsets", "bidirectional_ranges"}
    assert names | elsewhere >= {spec.name for spec in TENSORS if spec.level is not Level.SYSTEM}


def run_random_lives(seed: int, num_steps: int, in_flight: bool = False) -> None:
    """Arrivals, chunks, prefix hits, drafts, both orders, padding, windows, ranks, recurrent groups, moved rows,
    preemption, rows used again, late samples of removed requests; in flight, steps that are resolved, some cancelled.
    """
    pick = Picks(random.Random(seed).randint)
    live(random_lives(pick, in_flight), pick, num_steps)


def live(lives: Lives, pick: Picks, num_steps: int) -> None:
    for _ in range(num_steps):
        for _ in range(pick.integer(0, 3)):
            lives.arrive(pick)
        match pick.integer(0, 9):
            case 0 if lives.model.requests:
                lives.leave(pick)
            case 1 if lives.model.requests:
                lives.preempt(pick)
            case 2 if lives.preempted:
                lives.resume(pick)
            case 3 if lives.ahead is None:
                lives.condense()
            case 4 if lives.ahead is None:
                lives.swap(pick)
        lives.step(pick)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("seed", range(int(EXAMPLES or 0), 2 * int(EXAMPLES)) if EXAMPLES else range(24))
def test_every_tensor_of_every_step_equals_the_model(seed):
    run_random_lives(seed, 40, in_flight=seed % 4 > 0)


class Machine(RuleBasedStateMachine):
    """The traffic as rules that hypothesis chooses and shrinks."""

    @initialize(data=st.data())
    def build(self, data):
        self.lives = random_lives(_drawn(data), in_flight=True)

    @rule(data=st.data(), count=st.integers(1, 3))
    def arrive(self, data, count):
        for _ in range(count):
            self.lives.arrive(_drawn(data))

    @precondition(lambda self: self.lives.model.requests)
    @rule(data=st.data())
    def leave(self, data):
        self.lives.leave(_drawn(data))

    @precondition(lambda self: self.lives.model.requests)
    @rule(data=st.data())
    def preempt(self, data):
        self.lives.preempt(_drawn(data))

    @precondition(lambda self: self.lives.preempted)
    @rule(data=st.data())
    def resume(self, data):
        self.lives.resume(_drawn(data))

    @precondition(lambda self: self.lives.ahead is None)
    @rule(data=st.data())
    def move(self, data):
        self.lives.condense() if _drawn(data).flag() else self.lives.swap(_drawn(data))

    @rule(data=st.data(), count=st.integers(1, 4))
    def steps(self, data, count):
        for _ in range(count):
            self.lives.step(_drawn(data))


def _drawn(data) -> Picks:
    return Picks(lambda low, high: data.draw(st.integers(low, high)))


TestRandomLives = Machine.TestCase
TestRandomLives.settings = settings(
    max_examples=int(EXAMPLES or 40),
    stateful_step_count=20,
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
