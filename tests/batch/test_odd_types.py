"""Values of unexpected types are taken by ``__index__`` or refused by a typed error, with nothing changed."""

import pickle
from typing import Any

import numpy as np
import pytest
from batch_rig import picture, states_of

from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.errors import ForewordError


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Broken:
    """An object whose conversions raise what no caller expects."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __len__(self) -> int:
        raise RuntimeError("no length")


ODD = [None, "12", b"12", 1.5, {1, 2}, {1: 2}, (x for x in (1, 2)), object(), Broken(), [Broken()], [[1], [1, 2]],
       2**70, [2**70], [None], ["1"], [True], np.float32(1), np.ones(2), np.ones((2, 2), int)]  # fmt: skip
FIELDS = ["req_id", "prompt_token_ids", "block_ids", "output_token_ids", "num_computed_tokens", "sampling_params",
          "lora_id", "prompt_embeds", "prompt_is_token_id", "mm_features", "mrope_positions", "mrope_delta",
          "encoder_len", "encoder_input", "pooling_params", "lora_request"]  # fmt: skip


@pytest.fixture(params=[True, False], ids=["native", "python"])
def states(request: pytest.FixtureRequest) -> RequestStates:
    made = states_of(rows=3, drafts=2, native=request.param)
    made.add_request(NewRequest("a", [1, 2, 3], [[1, 2]]))
    return made


def typed_or_done(states: RequestStates, call: Any) -> None:
    """The call succeeds, or raises an error of this library and changes nothing."""
    before, refused = picture(states), False
    try:
        call()
    except ForewordError:
        refused = True
    assert not refused or picture(states) == before


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}")
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_request(states, field, odd):
    given = {"req_id": "b", "prompt_token_ids": [1, 2], "block_ids": [[3]], field: odd}
    typed_or_done(states, lambda: states.add_request(NewRequest(**given)))
    for rid in states.req_ids:
        states.remove_request(rid)
    assert states.add_request(NewRequest("c", [1], [[3]])) == states.row_of("c")


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}")
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_an_argument_of_a_step(states, odd, backend):
    buffers = InputBuffers.for_states(states, 8)

    def prepare(plan: Any, **more: Any) -> Any:
        return prepare_inputs(states, plan, buffers, backend=backend, **more)

    rows = np.array([0], np.int32)
    calls = [
        lambda: prepare(odd), lambda: prepare({"a": odd}), lambda: prepare((odd, rows)),
        lambda: prepare((rows, odd)), lambda: prepare({"a": 3}, draft_tokens=odd),
        lambda: prepare({"a": 3}, draft_tokens={"a": odd}), lambda: prepare((rows, rows + 3), draft_tokens=odd),
        lambda: prepare({"a": 3}, pad_to=odd), lambda: prepare({"a": 3}, pad_to=(odd, None)),
        lambda: states.append_blocks("a", odd), lambda: states.append_blocks("a", [odd]),
        lambda: states.append_blocks_rows(odd, rows), lambda: states.append_blocks_rows(rows, odd),
        lambda: states.remove_rows(odd), lambda: states.append_blocks(odd, [[3]]),
    ]  # fmt: skip
    for call in calls:
        typed_or_done(states, call)
    for sampled in (odd, {"a": odd}, {"a": [odd]}, {"b": [1]}):
        if "a" in states and states.num_tokens[0] == 3:
            batch = prepare({"a": 3})
            typed_or_done(states, lambda sampled=sampled, batch=batch: states.commit(batch, sampled))


def test_integers_of_other_kinds_are_taken():
    states = states_of(rows=3)
    for i, kind in enumerate((Index, np.int64, np.array)):
        row = states.add_request(
            NewRequest(f"r{i}", [kind(1), 2], [[kind(3)]], num_computed_tokens=kind(1), lora_id=kind(4),
                       mrope_delta=kind(-2), encoder_len=kind(5))
        )  # fmt: skip
        columns = (states.num_computed_tokens, states.lora_id, states.rope_delta, states.encoder_len)
        assert [int(column[row]) for column in columns] == [1, 4, -2, 5]


def test_arrays_whose_type_is_not_numpys_own_object(states: RequestStates) -> None:
    """An array that was pickled has a dtype of its own, and a step of such arrays is the same step."""
    own = [np.array(values, np.int32) for values in ([0], [3], [7])]
    rows, counts, sampled = (pickle.loads(pickle.dumps(array)) for array in own)
    assert rows.dtype == np.int32
    assert rows.dtype is not np.dtype(np.int32)
    batch = prepare_inputs(states, (rows, counts), InputBuffers.for_states(states, 8))
    assert batch.input_ids.tolist() == [1, 2, 3]
    states.commit(batch, sampled)
    assert states.token_ids[0, :4].tolist() == [1, 2, 3, 7]
    frozen = np.array([1], np.int32)
    frozen.flags.writeable = False
    rows.flags.writeable = False
    assert prepare_inputs(states, (rows, frozen), InputBuffers.for_states(states, 8)).input_ids.tolist() == [7]


def test_a_step_of_arrays_that_are_not_in_c_order(states: RequestStates) -> None:
    states.add_request(NewRequest("b", [4, 5], [[3]]))
    rows, counts = np.array([[0, 3], [1, 2]], np.int32).T
    assert not rows.flags.c_contiguous
    batch = prepare_inputs(states, (rows, counts), InputBuffers.for_states(states, 8))
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
