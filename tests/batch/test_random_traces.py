"""Random lives of requests: every tensor of every step, on all three backends, against an independent model.

The same lives are drawn twice: by a state machine that shrinks what fails, and by seeds, which reach further in less
time. FOREWORD_EXAMPLES=2000 runs that many other traces of both kinds.
"""

import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
from batch_model import Group, Model, Request, Scheduled
from batch_rig import BACKENDS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foreword.batch import (
    CapacityError,
    ContextParallel,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    prepare_inputs,
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
    """Choices, from one source of integers."""

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


class Lives:
    """Three states with a backend each, and the model, with the same calls."""

    def __init__(self, pick: Picks) -> None:
        max_model_len = pick.one_of([1, 2, 5, 7, 12, 13, 17, 33])
        ranks = pick.one_of([None, None, (2, 0, 1), (2, 1, 2), (3, 1, 1), (3, 2, 2)])
        groups = []
        for _ in range(pick.integer(1, 3)):
            size, window = pick.one_of([1, 2, 3, 4, 6, 16]), pick.one_of([None, None, 1, 2, 3, 5])
            spread = ranks is not None and size % ranks[2] == 0 and pick.flag()
            groups.append(Group(size, window, ranks if spread else None))
        if pick.flag(6):
            groups.append(Group(1, state_of=max_model_len))
        self.model = Model(
            max_num_reqs=pick.one_of([1, 2, 4, 5, 6]),
            max_model_len=max_model_len,
            groups=groups,
            max_drafts=pick.one_of([0, 1, 3]),
            ranks=ranks,
        )
        self.max_tokens = pick.one_of([1, 9, 24, 40, 60])
        self.states = [
            RequestStates(
                max_num_reqs=self.model.max_num_reqs,
                max_model_len=self.model.max_model_len,
                vocab_size=VOCAB,
                kv_groups=[
                    KVGroup(
                        g.block_size,
                        sliding_window=g.window,
                        context_parallel=g.ranks is not None,
                        recurrent=g.state_of is not None,
                    )
                    for g in groups
                ],
                max_num_draft_tokens=self.model.max_drafts,
                context_parallel=ContextParallel(*ranks) if ranks else None,
            )
            for _ in BACKENDS
        ]
        self.buffers = [InputBuffers.for_states(states, self.max_tokens) for states in self.states]
        self.next_block = pick.one_of([1, 1, 2**30])
        self.serial = 0
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
            ids[:below] = [0] * below
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
            known, rest = len(request.tokens), len(request.tokens) - request.computed
            if not rest or not left or pick.flag(6):
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
        for rid, request in list(self.model.requests.items()):
            if request.computed == len(request.tokens):  # ended: nothing was sampled after its last token
                self.remove(rid)
        wanted = self.choose(pick)
        self.grow(pick, wanted)
        total = sum(num for _, num, _ in wanted)
        pads = (
            pick.integer(total, self.max_tokens) if pick.flag() else None,
            pick.integer(len(wanted), self.model.max_num_reqs) if pick.flag() else None,
        )
        order, gather = pick.one_of(["given", "decode_first"]), not pick.flag(4)
        step = self.model.plan(wanted, order)
        expected = self.model.tensors(step, *pads, self.max_tokens)
        plan, drafts = self.forms(pick, wanted)
        batches = []
        for states, buffers, backend in zip(self.states, self.buffers, BACKENDS, strict=True):
            batch = prepare_inputs(
                states, plan, buffers, draft_tokens=drafts, pad_to=None if pads == (None, None) else pads,
                order=order, backend=backend, gather_block_tables=gather,
            )  # fmt: skip
            compare(batch, buffers, expected, gather, backend)
            batches.append(batch)
        if pick.flag(4):
            validate(batches[2])
        for s in step:
            self.meanwhile(pick, s)
        self.commit(pick, step, batches)
        self.check()

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

    def commit(self, pick: Picks, step: list[Scheduled], batches: list) -> None:
        sampled = {}
        for s in step:
            most = 1
            if self.model.samples_of(s):
                most = min(len(s.drafts) + 1, self.model.max_model_len - len(s.request.tokens))
            sampled[s.rid] = pick.tokens(0 if most and pick.flag(12) else pick.integer(min(most, 1), most))
        given: object
        match pick.integer(0, 2):
            case 0:
                given = sampled
            case 1:
                given = {rid: ids for rid, ids in sampled.items() if ids}
            case _:
                width = max([1, *(len(ids) for ids in sampled.values())])
                rows = [sampled[s.rid] + [-1] * (width - len(sampled[s.rid])) for s in step]
                given = np.array(rows, np.int32).reshape(len(step), width)
                given = given[:, 0] if width == 1 and pick.flag() else given
        for states, batch in zip(self.states, batches, strict=True):
            states.commit(batch, given)
            with pytest.raises(PlanError):
                states.commit(batch, given)
        self.model.commit(step, sampled)

    def check(self) -> None:
        """The states are the model's."""
        for states in self.states:
            assert set(states.req_ids) == set(self.model.requests)
            for name, column in self.model.state().items():
                expected = np.full(self.model.max_num_reqs, -1 if name == "last_sampled_token" else 0)
                expected[list(column)] = list(column.values())
                assert np.array_equal(getattr(states, name), expected), name
            for rid, request in self.model.requests.items():
                assert states.row_of(rid) == request.row
                assert states.token_ids[request.row, : len(request.tokens)].tolist() == request.tokens
            for g, table in enumerate(states.block_tables):
                expected = np.zeros_like(table.table)
                for request in self.model.requests.values():
                    expected[request.row, : len(request.blocks[g])] = request.blocks[g]
                assert np.array_equal(table.table, expected)


def compare(batch, buffers, expected: dict, gathered: bool, backend: str) -> None:
    """The batch's own views, and the buffers' memory to its end."""
    explained = {}
    for name, want in expected.items():
        base, _, rest = name.partition("[")
        g = int(rest[:-1]) if rest else 0
        if base == "block_table" and not gathered:
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
            got, view = buffers[base], getattr(batch, base)
            got, view = (got[g], view[g]) if isinstance(got, tuple) else (got, view)
            lengths = {**expected, "num_logits": len(expected["expanded_local_pos"])}
            assert np.array_equal(view, got[: lengths[PADDED_TO_THE_END[base]]]), (backend, name)
        else:
            got = getattr(batch, base)
        if want is None:
            continue
        want = np.array(want).reshape(np.shape(got)) if np.size(got) == 0 else np.array(want)
        assert np.array_equal(got, want), f"{backend}: {name}: expected {want.tolist()}, got {np.asarray(got).tolist()}"


def test_the_model_has_every_tensor_of_a_step():
    model = Model(max_num_reqs=1, max_model_len=4, groups=[Group(2, None, None)], max_drafts=0, ranks=(2, 0, 1))
    names = {name.partition("[")[0] for name in model.tensors([], None, None, 4)}
    elsewhere = {"num_placeholders", "row_generation", "num_blocks", "block_offsets"}  # tests of their own
    assert names | elsewhere >= {spec.name for spec in TENSORS if spec.level is not Level.SYSTEM}


def run_random_lives(seed: int, num_steps: int) -> None:
    """Arrivals, chunks, prefix hits, drafts, both orders, padding, windows, ranks, recurrent groups, moved rows,
    preemption, rows used again, late samples of removed requests.
    """
    pick = Picks(random.Random(seed).randint)
    lives = Lives(pick)
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
            case 3:
                lives.condense()
            case 4:
                lives.swap(pick)
        lives.step(pick)


@pytest.mark.parametrize("seed", range(int(EXAMPLES or 0), 2 * int(EXAMPLES)) if EXAMPLES else range(40))
def test_every_tensor_of_every_step_equals_the_model(seed):
    run_random_lives(seed, 40)


class Machine(RuleBasedStateMachine):
    """The same lives, as rules that hypothesis chooses and shrinks."""

    @initialize(data=st.data())
    def build(self, data):
        self.lives = Lives(_drawn(data))

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
