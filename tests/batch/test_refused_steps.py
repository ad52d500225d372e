"""A step that is refused does not count, and takes nothing from the step before it."""

import pytest
from batch_rig import every_backend, picture, states_of, tensors

from foreword.batch import InputBuffers, NewRequest, PlanError, RequestStates, StaleBatchError, prepare_inputs


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
