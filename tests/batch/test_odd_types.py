"""Token ids and counts are anything with ``__index__``: Python and NumPy integers, 0-d tensors.

Values of other types are refused by a typed error, with nothing changed.
"""

import pickle
from typing import Any

import numpy as np
import pytest
from batch_rig import picture, states_of

from foreword.batch import InputBuffers, NewRequest, PlanError, RequestError, RequestStates, prepare_inputs
from foreword.errors import ForewordError
from foreword.integers import as_int32


class Index:
    """An integer that is neither an `int` nor a NumPy integer."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class OnDevice(Index):
    """A 0-d tensor on a device: NumPy cannot read it."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")


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


@pytest.fixture
def two() -> RequestStates:
    made = states_of(vocab_size=100, drafts=2)
    for name, blocks in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        made.add_request(NewRequest(name, [11, 12, 13], block_ids=[blocks]))
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


# -- integers --------------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", [int, np.int64, np.uint64, np.array, Index, OnDevice])


@KINDS
def test_plans_drafts_and_samples_take_anything_with_an_index(two, kind):
    buffers = InputBuffers.for_states(two, 16)
    batch = prepare_inputs(two, {"a": kind(3), "b": 3}, buffers, pad_to=(kind(8), kind(4)))
    assert batch.num_scheduled_tokens.tolist() == [3, 3]
    assert (batch.num_tokens_padded, batch.num_reqs_padded) == (8, 4)
    two.commit(batch, {"a": [kind(42)], "b": [43]})
    batch = prepare_inputs(two, {"a": 3, "b": 1}, buffers, draft_tokens={"a": [kind(7), 8]})
    assert batch.input_ids.tolist() == [42, 7, 8, 43]
    two.commit(batch, {"a": [kind(7), kind(9)]})
    assert two.token_ids[two.row_of("a"), :6].tolist() == [11, 12, 13, 42, 7, 9]


@KINDS
def test_prompts_and_blocks_take_anything_with_an_index(two, kind):
    counts = {"num_computed_tokens": kind(1), "lora_id": kind(4), "encoder_len": kind(5)}
    row = two.add_request(NewRequest("c", [kind(1), 2], block_ids=[[kind(7)]], **counts))
    assert two.token_ids[row, :2].tolist() == [1, 2]
    assert two.block_tables[0].table[row, 0] == 7
    assert [two.num_computed_tokens[row], two.lora_id[row], two.encoder_len[row]] == [1, 4, 5]
    row = two.add_request(NewRequest("d", [1], [[8]], mrope_delta=Index(-2)))
    assert two.rope_delta[row] == -2


@pytest.mark.parametrize("token", [1.0, np.float32(1), "1", None, True, [1], Index(100), Index(-1)])
def test_a_sample_that_is_not_a_token_id_is_named(two, token):
    batch = prepare_inputs(two, {"a": 3, "b": 3}, InputBuffers.for_states(two, 16))
    with pytest.raises(RequestError, match=r"request 'b': sampled = .*: must be a token id; the vocabulary has 100"):
        two.commit(batch, {"a": [1], "b": [token]})
    two.commit(batch, {"a": [1], "b": [2]})


@pytest.mark.parametrize("tokens", [1, np.array(1), None])
def test_samples_that_are_not_a_list_are_named(two, tokens):
    batch = prepare_inputs(two, {"a": 3, "b": 3}, InputBuffers.for_states(two, 16))
    with pytest.raises(RequestError, match=r"request 'b': sampled = .*: expected a list of token ids"):
        two.commit(batch, {"a": [1], "b": tokens})


@pytest.mark.parametrize("count", [1.5, "3", None, [3], [1, [2]], 2**40, np.float64(3), Index(2**31)])
def test_a_count_that_is_not_an_integer_is_named(two, count):
    with pytest.raises(PlanError, match=r"expected a number of tokens \(request 'b', tensor 'num_scheduled_tokens'"):
        prepare_inputs(two, {"a": Index(3), "b": count}, InputBuffers.for_states(two, 16))


@pytest.mark.parametrize("drafts", [1, np.array(1), [[1, 2]], [1.5], [None], ["1"]])
def test_drafts_that_are_not_a_list_of_token_ids_are_refused(two, drafts):
    buffers = InputBuffers.for_states(two, 16)
    two.commit(prepare_inputs(two, {"a": 3, "b": 3}, buffers), {"a": [1], "b": [2]})
    with pytest.raises(PlanError, match="draft_tokens"):
        prepare_inputs(two, {"a": 2, "b": 1}, buffers, draft_tokens={"a": drafts})


def test_a_whole_tensor_on_a_device_raises_its_own_error(two):
    batch = prepare_inputs(two, {"a": 3, "b": 3}, InputBuffers.for_states(two, 16))
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        two.commit(batch, OnDevice(1))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ((), []),
        ([np.int64(3), np.uint64(4)], [3, 4]),
        ([[Index(1), 2], [3, Index(4)]], [[1, 2], [3, 4]]),
        (np.array([1, 2], object), [1, 2]),
        ([-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
    ],
)
def test_integers_become_int32(values, expected):
    array = as_int32(values)
    assert array is not None
    assert array.dtype == np.int32
    assert array.tolist() == expected


@pytest.mark.parametrize(
    "values", [[1.0], 1.5, [2**31], [-(2**31) - 1], 2**70, [True], [[1], [1, 2]], ["1"], [Index(2**31)], [1, None]]
)
def test_what_is_not_an_int32_is_refused(values):
    assert as_int32(values) is None
