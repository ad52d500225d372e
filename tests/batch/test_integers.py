"""Token ids and counts are anything with ``__index__``: Python and NumPy integers, 0-d tensors."""

import numpy as np
import pytest
from batch_rig import states_of

from foreword.batch import InputBuffers, NewRequest, PlanError, RequestError, RequestStates, prepare_inputs
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


KINDS = pytest.mark.parametrize("kind", [int, np.int64, np.uint64, np.array, Index, OnDevice])


@pytest.fixture
def states() -> RequestStates:
    states = states_of(vocab_size=100, drafts=2)
    for name, blocks in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        states.add_request(NewRequest(name, [11, 12, 13], block_ids=[blocks]))
    return states


@KINDS
def test_plans_drafts_and_samples_take_anything_with_an_index(states, kind):
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": kind(3), "b": 3}, buffers, pad_to=(kind(8), kind(4)))
    assert batch.num_scheduled_tokens.tolist() == [3, 3]
    assert (batch.num_tokens_padded, batch.num_reqs_padded) == (8, 4)
    states.commit(batch, {"a": [kind(42)], "b": [43]})
    batch = prepare_inputs(states, {"a": 3, "b": 1}, buffers, draft_tokens={"a": [kind(7), 8]})
    assert batch.input_ids.tolist() == [42, 7, 8, 43]
    states.commit(batch, {"a": [kind(7), kind(9)]})
    assert states.token_ids[states.row_of("a"), :6].tolist() == [11, 12, 13, 42, 7, 9]


@KINDS
def test_prompts_and_blocks_take_anything_with_an_index(states, kind):
    row = states.add_request(NewRequest("c", [kind(1), 2], block_ids=[[kind(7)]]))
    assert states.token_ids[row, :2].tolist() == [1, 2]
    assert states.block_tables[0].table[row, 0] == 7


@pytest.mark.parametrize("token", [1.0, np.float32(1), "1", None, True, [1], Index(100), Index(-1)])
def test_a_sample_that_is_not_a_token_id_is_named(states, token):
    batch = prepare_inputs(states, {"a": 3, "b": 3}, InputBuffers.for_states(states, 16))
    with pytest.raises(RequestError, match=r"request 'b': sampled = .*: must be a token id; the vocabulary has 100"):
        states.commit(batch, {"a": [1], "b": [token]})
    states.commit(batch, {"a": [1], "b": [2]})


@pytest.mark.parametrize("tokens", [1, np.array(1), None])
def test_samples_that_are_not_a_list_are_named(states, tokens):
    batch = prepare_inputs(states, {"a": 3, "b": 3}, InputBuffers.for_states(states, 16))
    with pytest.raises(RequestError, match=r"request 'b': sampled = .*: expected a list of token ids"):
        states.commit(batch, {"a": [1], "b": tokens})


@pytest.mark.parametrize("count", [1.5, "3", None, [3], [1, [2]], 2**40, np.float64(3), Index(2**31)])
def test_a_count_that_is_not_an_integer_is_named(states, count):
    with pytest.raises(PlanError, match=r"expected a number of tokens \(request 'b', tensor 'num_scheduled_tokens'"):
        prepare_inputs(states, {"a": Index(3), "b": count}, InputBuffers.for_states(states, 16))


@pytest.mark.parametrize("drafts", [1, np.array(1), [[1, 2]], [1.5], [None], ["1"]])
def test_drafts_that_are_not_a_list_of_token_ids_are_refused(states, drafts):
    buffers = InputBuffers.for_states(states, 16)
    states.commit(prepare_inputs(states, {"a": 3, "b": 3}, buffers), {"a": [1], "b": [2]})
    with pytest.raises(PlanError, match="draft_tokens"):
        prepare_inputs(states, {"a": 2, "b": 1}, buffers, draft_tokens={"a": drafts})


def test_a_whole_tensor_on_a_device_raises_its_own_error(states):
    batch = prepare_inputs(states, {"a": 3, "b": 3}, InputBuffers.for_states(states, 16))
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        states.commit(batch, OnDevice(1))


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
