"""A step that is refused does not count, and takes nothing from the step before it."""

import numpy as np
import pytest
from batch_rig import every_backend, every_check, picture, states_of, tensors

from foreword.batch import (
    InputBuffers,
    NewRequest,
    PlanError,
    RequestError,
    RequestStates,
    StaleBatchError,
    prepare_inputs,
)


def make() -> RequestStates:
    """Two requests; "short" has blocks for 4 of its 6 tokens."""
    states = states_of(drafts=2)
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    states.add_request(NewRequest("short", [4, 5, 6, 7, 8, 9], [[4, 5]]))
    return states


def admit_thief(states: RequestStates) -> None:
    """A request with a block that "a" has."""
    states.add_request(NewRequest("thief", [4, 5, 6], [[2, 7]]))


REFUSED = [  # plan, and more
    ({"short": 5}, {}),
    ({"a": 4}, {}),
    ({"a": 0}, {}),
    ({"nobody": 1}, {}),
    ({"a": 3}, {"draft_tokens": {"a": [9, 9, 9]}}),
    ({"a": 3}, {"draft_tokens": {"short": [9]}}),
    ({"a": 3}, {"pad_to": (2, None)}),
    ({"a": 3}, {"order": "shuffled"}),
    ({"a": 3}, {"backend": "abacus"}),
    ((np.array([0, 0], np.int32), np.array([1, 1], np.int32)), {}),
]


@every_backend
@every_check
@pytest.mark.parametrize(("plan", "more"), REFUSED, ids=range(len(REFUSED)))
def test_a_refused_plan_leaves_the_batch_before_it_usable(plan, more, check, backend):
    states = make()
    buffers = InputBuffers.for_states(states, 8)
    batch = prepare_inputs(states, {"a": 3}, buffers, pad_to=(5, 2), backend=backend, check=check)
    before, held = tensors(batch), picture(states)
    with pytest.raises((PlanError, RequestError)):
        prepare_inputs(states, plan, buffers, **{"backend": backend, "check": check} | more)
    assert tensors(batch) == before
    assert picture(states) == held
    states.commit(batch, {"a": [9]})
    assert states.num_tokens[0] == 4


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
