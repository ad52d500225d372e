"""Checks of a running engine's steps: what passes, and what is refused by name."""

import numpy as np
import pytest
from batch_rig import World, every_backend, states_and_buffers
from batch_scenes import SCENES, scene

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequest, PlanError, advance, prepare_inputs, resolve
from foreword.batch.proof.checker import CacheChecker, check_bounds
from foreword.batch.values.block_ops import BlockOps

S = 2


class Engine(World):
    """States and buffers of a small cache, every step checked in full."""

    def __init__(self, **group):
        super().__init__(KVGroup(S, **group), vocab_size=100, drafts=2, tokens=24)

    def admit(self, rid, prompt, blocks, computed=0, **extra):
        self.add(rid, prompt, [blocks], num_computed_tokens=computed, **extra)

    def prepare(self, plan, check="full", **how):
        return super().prepare(plan, check=check, **how)

    def refused(self, plan, **how) -> PlanError:
        with pytest.raises(PlanError) as caught:
            self.step(plan, **how)
        return caught.value


@pytest.fixture
def engine():
    return Engine()


# -- what passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["off", "bounds", "full"])
@every_backend
def test_a_life_of_chunks_decodes_and_drafts_passes(level, backend):
    engine = Engine()
    engine.admit("a", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    for n, drafts, sampled in ((2, [], []), (3, [], [6]), (1, [], [7]), (1, [8, 9], [8, 3])):
        plan, ids = {"a": n + len(drafts)}, {"a": drafts} if drafts else None
        batch = prepare_inputs(engine.states, plan, engine.buffers, draft_tokens=ids, check=level, backend=backend)
        engine.states.commit(batch, {"a": sampled})
    engine.step({"a": 1}, sampled={"a": [4]})


def test_a_prefix_that_another_request_wrote_is_shared(engine):
    engine.admit("a", [1, 2, 3, 4, 5], [1, 2, 3])
    engine.step({"a": 5}, sampled={"a": [6]})
    engine.admit("b", [1, 2, 3, 4, 9], [1, 2, 4], computed=4)
    engine.step({"b": 1, "a": 1}, sampled={"a": [7], "b": [7]})


def test_a_prefix_of_a_request_that_left_is_shared(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.states.remove_request("a")
    engine.admit("b", [1, 2, 9], [1, 3], computed=2)
    engine.step({"b": 1}, sampled={"b": [4]})


def test_a_prefix_that_no_checked_step_wrote_counts_as_filled_by_the_caller(engine):
    engine.admit("a", [1, 2, 3], [1, 2], computed=2)
    engine.step({"a": 1}, sampled={"a": [4]})
    engine.step({"a": 1}, sampled={"a": [4]})


def test_a_hit_that_ends_inside_a_block_is_refused_unless_its_copy_is_declared(engine):
    engine.admit("a", [1, 2, 3, 4], [1, 2])
    engine.step({"a": 4}, sampled={"a": [5]})
    engine.states.remove_request("a")
    engine.admit("b", [1, 2, 9, 9], [1, 2], computed=3)  # block 2 holds [3, 4]
    with pytest.raises(PlanError, match="does not hold the request's tokens"):
        engine.step({"b": 1}, sampled={"b": [4]})
    CacheChecker.of(engine.states).share("b", 3)  # a 9 was copied over the 3 outside the step
    engine.step({"b": 1}, sampled={"b": [4]})


def test_a_copied_block_carries_what_was_written(engine):
    engine.admit("a", [1, 2, 3, 4], [1, 2])
    engine.step({"a": 4}, sampled={"a": [5]})
    engine.admit("b", [1, 2, 3, 9], [1, 3], computed=3)
    engine.step({"b": 1}, sampled={"b": [4]}, block_ops=BlockOps.of(copies=[(2, 3)]))


def test_what_a_connector_put_there_is_declared(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.states.remove_request("a")
    engine.admit("b", [7, 8, 9], [1, 2], computed=2)
    CacheChecker.of(engine.states).share("b", 2)
    engine.step({"b": 1}, sampled={"b": [4]})


def test_rows_that_move_keep_their_shadow(engine):
    engine.admit("a", [1], [1])
    engine.admit("b", [1, 2, 3], [2, 3])
    engine.step({"a": 1, "b": 3}, sampled={"a": [4], "b": [4]})
    engine.states.remove_request("a")
    assert engine.states.condense() == [(1, 0)]
    engine.step({"b": 1}, sampled={"b": [4]})


def test_rejected_drafts_are_written_over(engine):
    engine.admit("a", [1, 2], [1, 2, 3])
    engine.step({"a": 4}, draft_tokens={"a": [5, 6]}, sampled={"a": [9]})
    engine.step({"a": 3}, draft_tokens={"a": [7, 8]}, sampled={"a": [7, 8, 1]})
    engine.step({"a": 1}, sampled={"a": [1]})


def test_two_steps_in_flight_are_checked_when_resolved(engine):
    engine.admit("a", [1, 2], [1, 2, 3])
    first = engine.step({"a": 4}, draft_tokens={"a": [5, 6]})
    advance(engine.states, first)
    later = InputBuffers.for_states(engine.states, 24)
    second = prepare_inputs(engine.states, {"a": 1}, later, check="full")
    assert not second.is_resolved
    engine.states.commit(first, {"a": [9]})
    resolve(second)
    engine.states.commit(second, {"a": [3]})
    engine.step({"a": 1}, sampled={"a": [4]})


@pytest.mark.parametrize("again", ["resolved", "prepared again"])
def test_the_copies_of_a_step_are_made_once(engine, again):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.states.remove_request("a")
    engine.admit("b", [1, 2, 5], [3, 4], computed=1)  # reads the copy of block 1,
    engine.admit("c", [6, 7], [1])  # which is written over in the same step
    copied = {"block_ops": BlockOps(np.zeros(0, np.int32), np.array([[1, 3]], np.int32))}
    batch = engine.step({"b": 2, "c": 2}, **copied)
    if again == "resolved":
        resolve(batch)
        engine.states.commit(batch, {"b": [8], "c": [9]})
    else:
        engine.step({"b": 2, "c": 2}, sampled={"b": [8], "c": [9]}, **copied)
    engine.states.append_blocks("c", [[5]])
    engine.step({"b": 1, "c": 1}, sampled={"b": [1], "c": [2]})


def test_steps_that_went_by_unchecked_are_taken_for_granted(engine):
    engine.admit("a", [1, 2], [1, 2])
    engine.step({"a": 1}, sampled={"a": []})
    engine.states.commit(prepare_inputs(engine.states, {"a": 1}, engine.buffers), {"a": [3]})
    engine.step({"a": 1}, sampled={"a": [4]})


def test_blocks_below_the_window_may_be_given_to_others():
    engine = Engine(sliding_window=2)
    engine.admit("a", [1, 2, 3, 4, 5], [1, 2, 3])
    engine.step({"a": 5}, sampled={"a": [6]})
    CacheChecker.of(engine.states).blocks_freed([1])
    engine.admit("b", [9], [1])
    engine.step({"a": 1, "b": 1}, sampled={"a": [7], "b": [7]})


# -- what is refused ---------------------------------------------------------------------------------------------


def test_two_requests_with_one_block_to_write(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.admit("b", [1, 2, 3], [1, 3])
    error = engine.refused({"a": 3, "b": 3})
    assert (error.tensor, error.step) == ("slot_mapping[0]", 1)
    assert "two tokens of a step write one slot" in str(error)


def test_a_write_to_a_block_that_another_request_sees(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.admit("b", [1, 2, 3, 8], [1, 2], computed=3)
    error = engine.refused({"b": 1})
    assert (error.request, error.tensor, error.index, error.got) == ("b", "slot_mapping[0]", 0, 5)
    assert "which request 'a' sees" in str(error)


def test_two_states_in_one_block_are_named():
    engine = Engine(recurrent=True)
    engine.admit("a", [1, 2, 3], [1])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.admit("b", [1, 2, 3, 5], [1], computed=3)  # shared, where it should start from a copy
    error = engine.refused({"b": 1, "a": 1})
    assert "states in one block" in str(error)
    assert "request 'a'" in str(error)


@pytest.mark.parametrize(
    ("first", "prompt", "blocks", "hit", "entry", "position"),
    [
        ([1, 2, 3], [1, 9, 3], [1, 3], {"computed": 2}, 0, 1),
        ([1, 2, 3, 4, 5], [8, 9, 3, 4, 5], [4, 2, 5], {"computed": 4}, 1, 2),
        ([1, 2, 3], [1, 2, 3], [1, 3], {"computed": 2, "lora_id": 1}, 0, 0),
    ],
    ids=["another token", "another beginning", "another adapter"],
)
def test_a_hit_with_other_tokens(engine, first, prompt, blocks, hit, entry, position):
    engine.admit("a", first, [1, 2, 6])
    engine.step({"a": len(first)}, sampled={"a": [4]})
    engine.admit("b", prompt, blocks, **hit)
    error = engine.refused({"b": 1})
    assert (error.request, error.tensor, error.index) == ("b", "block_table[0]", (0, entry))
    assert error.expected == f"the key and value of position {position}"
    assert error.got == "written by request 'a', with other tokens"


def test_a_token_that_was_skipped(engine):
    engine.admit("a", [1, 2, 3, 4], [1, 2])
    engine.step({"a": 1}, sampled={})
    engine.states.num_computed_tokens[engine.states.row_of("a")] = 3
    error = engine.refused({"a": 1})
    assert (error.request, error.expected) == ("a", "the key and value of position 1")
    assert error.got == "nothing was written there"


def test_rejected_drafts_counted_as_computed(engine):
    engine.admit("a", [1, 2], [1, 2, 3])
    engine.step({"a": 4}, draft_tokens={"a": [5, 6]}, sampled={"a": [9]})
    row = engine.states.row_of("a")
    engine.states.token_ids[row, 3:5] = 9, 9
    engine.states.num_tokens[row], engine.states.num_computed_tokens[row] = 5, 4
    error = engine.refused({"a": 1})
    assert error.expected == "the key and value of position 2"
    assert error.got == "written by request 'a', with other tokens"


def test_a_block_given_back_while_its_request_lives(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    CacheChecker.of(engine.states).blocks_freed([2])
    error = engine.refused({"a": 1})
    assert (error.request, error.tensor, error.index, error.got) == ("a", "states.block_table[0]", (0, 1), 2)


def test_a_block_given_back_and_given_to_another_while_its_request_lives(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    CacheChecker.of(engine.states).blocks_freed([2])
    engine.admit("b", [5], [2])
    assert engine.refused({"b": 1}).request == "a"


def test_a_block_given_back_and_taken_again_is_new(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    engine.states.remove_request("a")
    CacheChecker.of(engine.states).blocks_freed([1, 2])
    engine.admit("b", [5, 6, 7], [2, 1])
    engine.step({"b": 3}, sampled={"b": [5]})
    engine.step({"b": 1}, sampled={"b": [5]})


def test_context_that_another_request_wrote_over(engine):
    engine.admit("a", [1, 2, 3], [1, 2])
    engine.step({"a": 3}, sampled={"a": [4]})
    contents = CacheChecker.of(engine.states).contents
    contents.groups[0].write(np.array([2]), np.array([7], np.uint64), np.array([99], np.int32))
    contents._names[99] = "stranger"
    assert engine.refused({"a": 1}).got == "written by request 'stranger', with other tokens"


def test_an_unknown_level_is_refused(engine):
    with pytest.raises(PlanError, match="must be 'off', 'bounds' or 'full'"):
        prepare_inputs(engine.states, {}, engine.buffers, check="some")


def test_a_closed_checker_no_longer_follows_the_states(engine):
    engine.step({})
    checker = CacheChecker.of(engine.states)
    assert isinstance(checker, CacheChecker)
    checker.close()
    assert engine.states.observers == []


# -- the bounds level --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENES)
def test_bounds_lets_a_right_batch_pass(name):
    made = scene(name)
    check_bounds(made.batch)


@pytest.mark.parametrize(
    ("tensor", "at", "value"),
    [
        ("idx_mapping", 1, 6),
        ("idx_mapping", 0, -1),
        ("num_scheduled_tokens", 0, 0),
        ("num_draft_tokens", 0, 4),
        ("num_draft_tokens", 2, 1),
        ("query_start_loc", 1, 0),
        ("query_start_loc", 5, 3),
        ("cu_num_logits", 2, 9),
        ("cu_num_draft_tokens", 1, -1),
        ("seq_lens", 2, 14),
    ],
)
def test_bounds_names_a_sum_that_does_not_add_up(tensor, at, value):
    made = scene("drafts")
    made.buffers[tensor][at] = value
    with pytest.raises(PlanError) as caught:
        check_bounds(made.batch)
    assert (caught.value.tensor, caught.value.step) == (tensor, 42)


def test_bounds_names_a_row_without_enough_blocks():
    made = scene("drafts")
    made.states.block_tables[1].num_blocks[made.states.row_of("b")] = 1
    with pytest.raises(PlanError) as caught:
        check_bounds(made.batch)
    assert (caught.value.tensor, caught.value.request, caught.value.expected) == ("num_blocks[1]", "b", 2)


def test_a_step_prepared_again_and_again_without_a_commit_is_warned_of_once():
    states, buffers = states_and_buffers()
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3, 4]]))

    def step(count: int) -> InputBatch:
        return prepare_inputs(states, {"a": count}, buffers, check="full")

    step(3)
    step(3)
    with pytest.warns(RuntimeWarning, match=r"step 3 has the same tokens as the 2 steps before.*states\.commit"):
        step(3)
    step(3)
    step(2)
    step(2)
    states.commit(step(3), {"a": [4]})
    for token in (5, 6, 7):
        states.commit(step(1), {"a": [token]})


def test_a_step_that_is_resolved_is_not_prepared_again():
    states, buffers = states_and_buffers()
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3, 4]]))
    batch = prepare_inputs(states, {"a": 3}, buffers, check="full")
    for _ in range(4):
        resolve(batch)
