"""Two steps in flight: what is refused, the ring of their buffers, and which samples count."""

import pytest
from batch_rig import World, every_backend

from foreword.batch import KVGroup, PlanError, StagingRing, advance, discard_mask, prepare_inputs, resolve

D, M, VOCAB = 3, 40, 97
GROUPS = [KVGroup(block_size=4), KVGroup(block_size=3, sliding_window=5)]


def world() -> World:
    return World(*GROUPS, rows=5, length=M, vocab_size=VOCAB, drafts=D, tokens=16)


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


@every_backend
def test_a_sample_counts_from_the_last_known_token_on(backend):
    """Chunks of a prompt of 5: the first two are discarded; then drafts, of which two, none and all are accepted."""
    made = World(KVGroup(48), rows=2, length=48, drafts=2, tokens=16)
    states = made.states
    made.add("other", [1])
    made.add("a", [1, 2, 3, 4, 5])
    assert states.num_accepted_tokens.tolist() == [1, 1]
    steps = [  # scheduled, drafts, sampled: is the sample discarded, how many count
        (2, [], [9], True, 1),
        (2, [], [], True, 1),
        (1, [], [6], False, 1),
        (3, [7, 8], [7, 8, 9], False, 3),
        (3, [7, 8], [5], False, 1),
        (2, [7], [7, 4], False, 2),
        (1, [], [], False, 1),
    ]
    for n, drafts, sampled, discarded, counted in steps:
        batch = made.prepare({"a": n}, draft_tokens={"a": drafts} if drafts else None, backend=backend)
        assert discard_mask(batch).tolist() == [discarded]
        states.commit(batch, {"a": sampled})
        assert states.num_accepted_tokens.tolist() == [1, counted]
    states.remove_request("a")
    assert states.num_accepted_tokens.tolist() == [1, 1]
