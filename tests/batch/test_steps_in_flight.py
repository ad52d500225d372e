"""Two steps in flight: what was prepared early equals, once resolved, what would have been prepared in time."""

import random

import numpy as np
import pytest
from batch_rig import World, arrays, every_backend
from batch_scenes import TENSOR_NAMES

from foreword.batch import InputBuffers, KVGroup, PlanError, StagingRing, advance, make_dummy, prepare_inputs, resolve

D, M, VOCAB = 3, 40, 97
GROUPS = [KVGroup(block_size=4), KVGroup(block_size=3, sliding_window=5)]


def world() -> World:
    return World(*GROUPS, rows=5, length=M, vocab_size=VOCAB, drafts=D, tokens=16)


def next_token(tokens: list[int]) -> int:
    """A "model": the next token is a function of all tokens before it."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + 7) % VOCAB


class Engine(World):
    """Schedules every live request fully; drafts are guesses that are right about half of the time."""

    def __init__(self, backend: str, depth: int) -> None:
        super().__init__(*GROUPS, rows=5, length=M, vocab_size=VOCAB, drafts=D)
        self.backend, self.depth = backend, depth
        self.ring = StagingRing(self.states, max_num_batched_tokens=128, depth=2)
        self.wanted: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}

    def admit(self, rid: str, prompt: list[int], max_tokens: int) -> None:
        self.add(rid, prompt)
        self.wanted[rid], self.outputs[rid] = max_tokens, []

    def plan(self, num_drafts: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
        plan, drafts = {}, {}
        s = self.states
        for rid in s.req_ids:
            row = s.row_of(rid)
            need = int(s.num_tokens[row] + s.num_placeholders[row] - s.num_computed_tokens[row])
            if need < 1 or s.num_computed_tokens[row] + need + D >= M:
                continue
            take = min(need, 6)
            k = num_drafts.get(rid, 0) if take == need else 0
            plan[rid] = take + k
            if k:
                drafts[rid] = [-1] * k
        return plan, drafts

    def known_drafts(self, batch) -> dict[str, list[int]]:
        """What a drafter proposes once the tokens before are known: right, except where a hash says otherwise."""
        drafts = {}
        for b, rid in enumerate(batch.req_ids):
            k = int(batch.num_draft_tokens[b])
            if k and rid in self.states:
                tokens = self.tokens(rid)
                guess = []
                for j in range(k):
                    t = next_token(tokens + guess)
                    guess.append(t if (len(tokens) + j) % 3 else (t + 1) % VOCAB)
                drafts[rid] = guess
        return drafts

    def tokens(self, rid: str) -> list[int]:
        row = self.states.row_of(rid)
        return self.states.token_ids[row, : self.states.num_tokens[row]].tolist()

    def run_model(self, batch) -> dict[str, list[int]]:
        """Samples after verification: accepted drafts, then one more."""
        sampled = {}
        for b, rid in enumerate(batch.req_ids):
            if rid not in self.states or batch.row_generation[b] < 0:
                continue
            end = int(batch.seq_lens[b])
            k = int(batch.num_draft_tokens[b])
            first, last = int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1])
            ids = batch.input_ids[first:last].tolist()
            known = self.tokens(rid)
            assert ids[: len(ids) - k] == known[end - k - (len(ids) - k) : end - k]
            if end - k < len(known):
                continue
            out, drafts = [], ids[len(ids) - k :]
            for j in range(k + 1):
                out.append(next_token(known + out))
                if j < k and drafts[j] != out[-1]:
                    break
            sampled[rid] = out
        return sampled

    def finish(self, sampled: dict[str, list[int]]) -> None:
        for rid, tokens in sampled.items():
            self.outputs[rid] += tokens
            if len(self.outputs[rid]) >= self.wanted[rid]:
                self.outputs[rid] = self.outputs[rid][: self.wanted[rid]]
                self.states.remove_request(rid)


def run(backend: str, depth: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    engine = Engine(backend, depth)
    arrivals = [
        (f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))], rng.randint(1, 9)) for i in range(9)
    ]
    drafts_of = {rid: rng.randint(0, D) for rid, _, _ in arrivals}
    waiting, ahead = list(arrivals), None
    for _ in range(200):
        while waiting and len(engine.states) < 4:
            engine.admit(*waiting.pop(0))
        if ahead is None:
            plan, drafts = engine.plan(drafts_of)
            if not plan:
                break
            buffers = engine.ring.acquire()
            batch = prepare_inputs(engine.states, plan, buffers, draft_tokens=drafts, backend=backend)
        else:
            batch, buffers = ahead
        resolve(batch, engine.known_drafts(batch))
        fresh = InputBuffers.for_states(engine.states, 128)
        alive = [rid for b, rid in enumerate(batch.req_ids) if batch.row_generation[b] >= 0]
        in_time = prepare_inputs(
            engine.states,
            {rid: int(n) for rid, n in zip(batch.req_ids, batch.num_scheduled_tokens, strict=True) if rid in alive},
            fresh,
            draft_tokens=engine.known_drafts(batch),
            backend=backend,
        )
        if len(alive) == batch.num_reqs:
            for name in TENSOR_NAMES:
                if name != "num_blocks":
                    for ours, theirs in zip(arrays(getattr(batch, name)), arrays(getattr(in_time, name)), strict=True):
                        assert np.array_equal(ours, theirs), name
        else:
            live = batch.row_generation >= 0
            assert np.array_equal(batch.seq_lens[live], in_time.seq_lens)
            dead = ~live[batch.req_indices]
            for g in range(len(GROUPS)):
                assert (batch.slot_mapping[g][dead] == -1).all()
                assert (batch.block_table[g][~live] == 0).all()
            assert (batch.input_ids[dead] == 0).all()
        sampled = engine.run_model(batch)
        if depth == 2:
            advance(engine.states, batch)
            plan, drafts = engine.plan(drafts_of)
            ahead = None
            if plan:
                after = engine.ring.acquire()
                ahead = prepare_inputs(engine.states, plan, after, draft_tokens=drafts, backend=backend), after
        engine.states.commit(batch, sampled)
        engine.finish(sampled)
        engine.ring.release(buffers)
    assert not waiting
    return engine.outputs


@every_backend
@pytest.mark.parametrize("seed", range(6))
def test_depth_one_and_depth_two_give_equal_tokens(backend, seed):
    one, two = run(backend, 1, seed), run(backend, 2, seed)
    assert one == two
    assert all(one.values())


def test_an_unresolved_step_can_be_neither_committed_nor_advanced():
    made = world()
    states = made.states
    made.add("a", [1, 2])
    ring = StagingRing(states, max_num_batched_tokens=16)
    first = prepare_inputs(states, {"a": 2}, ring.acquire())
    advance(states, first)
    second = prepare_inputs(states, {"a": 1}, ring.acquire())
    assert not second.is_resolved
    assert second.input_ids.tolist() == [0]
    for use in (lambda: states.commit(second, {"a": [3]}), lambda: advance(states, second), lambda: resolve(second)):
        with pytest.raises(PlanError):
            use()
    states.commit(first, {"a": [9]})
    resolve(second)
    assert second.is_resolved
    assert second.input_ids.tolist() == [9]


def test_a_ring_refuses_to_reuse_a_slot_in_flight():
    ring = StagingRing(world().states, max_num_batched_tokens=16, depth=2)
    first, second = ring.acquire(), ring.acquire()
    with pytest.raises(PlanError, match="still read"):
        ring.acquire()
    ring.release(first)
    assert ring.acquire() is first
    ring.release(second)
    with pytest.raises(PlanError, match="not in use"):
        ring.release(second)


@pytest.mark.parametrize(("tokens", "reqs"), [(7, 3), (5, 5), (1, 1), (12, 5)])
def test_a_dummy_touches_nothing_and_shares_addresses(tokens, reqs):
    made = world()
    states, buffers = made.states, made.buffers
    for i in range(3):
        made.add(str(i), [1, 2, 3])
    real = made.prepare({"0": 3, "1": 3, "2": 3})
    addresses = real.input_ids.ctypes.data, real.block_table[0].ctypes.data
    before = states.token_ids.copy(), states.num_computed_tokens.copy()
    dummy = make_dummy(states, buffers, num_tokens=tokens, num_reqs=reqs)
    assert addresses == (dummy.input_ids.ctypes.data, dummy.block_table[0].ctypes.data)
    assert dummy.num_scheduled_tokens.sum() == tokens
    assert dummy.max_query_len == -(-tokens // reqs)
    assert (dummy.seq_lens == dummy.num_scheduled_tokens).all()
    for g in range(2):
        assert (buffers["slot_mapping"][g] == -1).all()
        assert (buffers["block_table"][g] == 0).all()
    assert (buffers["input_ids"] == 0).all()
    assert np.array_equal(before[0], states.token_ids)
    assert np.array_equal(before[1], states.num_computed_tokens)
    with pytest.raises(PlanError):
        states.commit(dummy, np.zeros(reqs, np.int32))
