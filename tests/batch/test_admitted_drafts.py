"""If a budget leaves out drafts, every tensor is that of a step with only the admitted drafts."""

import numpy as np
import pytest
from batch_rig import World, every_backend, picture, tensors

from foreword.batch import InputBuffers, KVGroup, PlanError, admit_drafts, advance, resolve, validate

DRAFTS = 3


def random_world(seed):
    """Prompts, chunks and decodes, and a plan with drafts for some of the decodes."""
    rng = np.random.default_rng(seed)
    world = World(KVGroup(4), KVGroup(2, sliding_window=5), rows=8, length=40, drafts=DRAFTS, tokens=200)
    plan, drafts = {}, {}
    for r in range(int(rng.integers(1, 8))):
        rid, prompt = str(r), int(rng.integers(1, 30))
        computed = int(rng.integers(0, prompt))
        world.add(rid, rng.integers(0, 50, prompt).tolist(), num_computed_tokens=computed)
        plan[rid] = prompt - computed if rng.random() < 0.7 else int(rng.integers(1, prompt - computed + 1))
        if plan[rid] == prompt - computed and (k := int(rng.integers(0, DRAFTS + 1))):
            drafts[rid] = rng.integers(-1, 50, k).tolist()
            plan[rid] += k
    return world, plan, drafts, {rid: int(rng.integers(0, len(ids) + 1)) for rid, ids in drafts.items()}


@pytest.mark.one_in(3)
@every_backend
@pytest.mark.parametrize("form", ["mapping", "array"])
def test_a_trimmed_step_is_the_step_of_the_drafts_that_are_left(backend, form):
    for seed in range(12):
        world, plan, drafts, admitted = random_world(seed)
        other, _, _, _ = random_world(seed)
        batch = world.prepare(plan, draft_tokens=drafts, backend=backend, pad_to=(150, 8), check="full")
        kept = {rid: n - len(drafts.get(rid, ())) + admitted.get(rid, 0) for rid, n in plan.items()}
        left = {rid: ids[: admitted[rid]] for rid, ids in drafts.items()}
        want = other.prepare(kept, draft_tokens=left, backend=backend, pad_to=(120, 8))
        counts = admitted if form == "mapping" else np.array([admitted.get(rid, 0) for rid in plan], np.int32)
        admit_drafts(batch, counts, pad_to=(120, 8))
        validate(batch)
        assert tensors(batch) == tensors(want)
        assert batch.scalars == want.scalars
        sampled = {rid: [7] * (1 + admitted.get(rid, 0)) for rid in plan}
        for states, step in ((world.states, batch), (other.states, want)):
            states.commit(step, sampled)
        assert picture(world.states) == picture(other.states)


def two_drafts():
    world = World(KVGroup(4), drafts=DRAFTS)
    world.add("a", [1, 2, 3], num_computed_tokens=2)
    world.add("b", [4, 5], num_computed_tokens=1)
    return world, world.prepare({"a": 3, "b": 1}, draft_tokens={"a": [8, 9]})


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"a": 3}, "more drafts admitted than planned"),
        ({"b": 1}, "more drafts admitted than planned"),
        ({"a": -1}, "fewer than none"),
        ({"c": 0}, "not in this batch"),
        ([1], "one count per request"),
        ([1, 0, 0], "one count per request"),
        ([0.5, 0], "must be integers"),
        ({"a": "x"}, "must be integers"),
    ],
)
def test_counts_that_are_not_of_the_planned_drafts_are_refused_and_change_nothing(counts, message):
    world, batch = two_drafts()
    before = tensors(batch), picture(world.states)
    with pytest.raises(PlanError, match=message):
        admit_drafts(batch, counts)
    assert (tensors(batch), picture(world.states)) == before


def test_a_padding_that_does_not_hold_the_trimmed_step_is_refused_and_changes_nothing():
    _, batch = two_drafts()
    before = tensors(batch)
    with pytest.raises(PlanError, match="pad_to tokens"):
        admit_drafts(batch, {"a": 1}, pad_to=(2, 2))
    assert tensors(batch) == before


def test_a_step_that_was_advanced_or_committed_cannot_be_trimmed():
    world, batch = two_drafts()
    advance(world.states, batch)
    with pytest.raises(PlanError, match="advanced or committed"):
        admit_drafts(batch, {"a": 1})


def test_the_sampler_may_return_as_many_tokens_as_were_admitted_and_one_more():
    world, batch = two_drafts()
    admit_drafts(batch, {"a": 1})
    assert (batch.num_draft_tokens.tolist(), batch.cu_num_logits.tolist()) == ([1, 0], [0, 2, 3])
    with pytest.raises(PlanError):
        world.states.commit(batch, {"a": [8, 9, 10], "b": [6]})
    world.states.commit(batch, {"a": [8, 30], "b": [6]})
    assert world.states.num_computed_tokens[world.states.row_of("a")] == 4


def test_a_request_that_was_removed_meanwhile_keeps_its_tokens_and_no_drafts():
    world = World(KVGroup(4), drafts=DRAFTS)
    for rid in "ab":
        world.add(rid, [1, 2, 3], num_computed_tokens=2)
    first = world.prepare({"a": 1, "b": 1})
    advance(world.states, first)
    second = world.prepare(
        {"a": 3, "b": 3}, InputBuffers.for_states(world.states, 64), draft_tokens={"a": [8, 9], "b": [8, 9]}
    )
    world.states.commit(first, {"a": [5], "b": [6]})
    world.states.remove_request("b")
    resolve(second)
    admit_drafts(second, np.array([1, 0], np.int32))
    assert second.num_scheduled_tokens.tolist() == [2, 1]
    assert second.row_generation.tolist()[1] == -1
    validate(second)
    world.states.commit(second, np.array([[8, 4], [-1, -1]], np.int32))
    assert world.states.num_computed_tokens[world.states.row_of("a")] == 5
