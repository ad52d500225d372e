"""A step that is refused does not count, and takes nothing from the step before it."""

import pytest
from batch_rig import every_backend, picture, states_of, tensors

from foreword.batch import (
    CapacityError,
    InputBuffers,
    NewRequest,
    PlanError,
    RequestError,
    RequestStates,
    StaleBatchError,
    prepare_inputs,
)


def make() -> RequestStates:
    states = states_of(drafts=2)
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    return states


def admit_thief(states: RequestStates) -> None:
    """A request with a block that "a" has."""
    states.add_request(NewRequest("thief", [4, 5, 6], [[2, 7]]))


@every_backend
def test_a_step_that_the_full_check_refuses_is_not_counted(backend):
    states = make()
    first, second = (InputBuffers.for_states(states, 8) for _ in range(2))
    batch = prepare_inputs(states, {"a": 3}, first, backend=backend, check="full")
    admit_thief(states)
    before, held = tensors(batch), picture(states)
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            prepare_inputs(states, {"thief": 2}, second, backend=backend, check="full")
        assert caught.value.step == 2
        assert picture(states) == held
    assert tensors(batch) == before
    states.commit(batch, {"a": [9]})
    states.remove_request("thief")
    after = prepare_inputs(states, {"a": 1}, second, backend=backend, check="full")
    assert (after.step, states._step) == (2, 2)
    states.commit(after, {"a": [8]})
    assert states.token_ids[0, :5].tolist() == [1, 2, 3, 9, 8]


@every_backend
def test_on_its_own_buffers_a_step_that_the_check_refuses_replaces_the_batch_before(backend):
    states = make()
    buffers = InputBuffers.for_states(states, 8)
    batch = prepare_inputs(states, {"a": 3}, buffers, backend=backend)
    admit_thief(states)
    with pytest.raises(PlanError, match="'a'"):
        prepare_inputs(states, {"thief": 2}, buffers, backend=backend, check="full")
    with pytest.raises(StaleBatchError):
        states.commit(batch, {"a": [9]})
    states.remove_request("thief")
    again = prepare_inputs(states, {"a": 3}, buffers, backend=backend, check="full")
    states.commit(again, {"a": [9]})
    assert states._step == 2


@every_backend
def test_a_refused_plan_names_its_own_step(backend):
    states = make()
    buffers = InputBuffers.for_states(states, 8)
    with pytest.raises(PlanError) as caught:
        prepare_inputs(states, {"a": 4}, buffers, backend=backend)
    assert caught.value.step == prepare_inputs(states, {"a": 3}, buffers, backend=backend).step == 1


@every_backend
def test_a_step_of_too_many_tokens_names_the_capacity(backend):
    states = make()
    with pytest.raises(CapacityError) as caught:
        prepare_inputs(states, {"a": 3}, InputBuffers.for_states(states, 2), backend=backend)
    assert (caught.value.tensor, caught.value.expected, caught.value.got) == ("max_num_batched_tokens", 2, 3)


def test_blocks_past_the_end_of_a_row_name_request_and_group():
    states = make()
    with pytest.raises(CapacityError) as caught:
        states.append_blocks("a", [[4] * 9])
    error = caught.value
    assert (error.request, error.tensor, error.expected, error.got) == ("a", "block_table[0]", 6, 12)


def test_a_request_can_be_given_other_tokens_progress_and_blocks():
    states, other = make(), states_of(drafts=2)
    buffers = InputBuffers.for_states(states, 8)
    states.commit(prepare_inputs(states, {"a": 3}, buffers), {"a": [4]})
    states.rewrite("a", [1, 2, 3, 8, 9], 4, [[5, 6, 7]])
    other.add_request(NewRequest("a", [1, 2, 3], [[5, 6, 7]], output_token_ids=[8, 9], num_computed_tokens=4))
    step, expected = (prepare_inputs(s, {"a": 1}, InputBuffers.for_states(s, 8)) for s in (states, other))
    own = {"row_generation", "is_prefilling", "states.row_generation"}
    assert {k: v for k, v in tensors(step).items() if k not in own} == {
        k: v for k, v in tensors(expected).items() if k not in own
    }


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (("b", [1], 0), "req_id"),
        (("a", [1, 2], 0), "token_ids"),
        (("a", [1] * 13, 0), "token_ids"),
        (("a", [1, 2, 77], 0), "token_ids[2]"),
        (("a", [1, 2, 3], 3), "num_computed_tokens"),
        (("a", [1, 2, 3], -1), "num_computed_tokens"),
        (("a", [1, 2, 3], 0, [[1], [2]]), "block_ids"),
    ],
)
def test_what_a_request_cannot_have_is_refused_and_changes_nothing(values, field):
    states = make()
    before = picture(states)
    with pytest.raises(RequestError) as caught:
        states.rewrite(*values)
    assert caught.value.field == field
    assert picture(states) == before
