"""The number that means "no block", on every backend: 0, which reserves block 0, or −1, which numbers blocks from 0."""

import numpy as np
import pytest
from batch_rig import every_backend, every_check, states_of

from foreword.batch import (
    InputBuffers,
    KVGroup,
    NewRequest,
    NewRequests,
    PlanError,
    RequestError,
    RequestStates,
    prepare_inputs,
)
from foreword.errors import ConfigError

NULLS = pytest.mark.parametrize("null", [0, -1], ids=["null 0", "null -1"])


def null_states(null: int, *groups: KVGroup, **settings) -> RequestStates:
    return states_of(*groups, null_block=null, **{"drafts": 2} | settings)


def plan_of(states: RequestStates, counts: dict[str, int], form: str):
    """A plan by request id, or as arrays."""
    if form == "ids":
        return counts
    return np.array([states.row_of(rid) for rid in counts], np.int32), np.array(list(counts.values()), np.int32)


# -- the number itself ---------------------------------------------------------------------------------------------


def test_block_zero_is_reserved_unless_said_otherwise():
    states = states_of(rows=1, length=4)
    with pytest.raises(RequestError, match=r"block_ids\[0\]\[0\] = 0: means no block.*null_block=-1"):
        states.add_request(NewRequest("a", [1, 2, 3], [[0, 1]]))


@pytest.mark.parametrize("null", [1, -2, None, True, 0.0])
def test_other_numbers_are_refused(null):
    with pytest.raises(ConfigError, match="null_block"):
        null_states(null)


@NULLS
def test_numbers_below_the_null_block_are_refused(null):
    states = null_states(null)
    with pytest.raises(RequestError, match="block_ids"):
        states.add_request(NewRequest("a", [1, 2], [[null - 1]]))
    states.add_request(NewRequest("a", [1, 2], [[null + 1]]))
    with pytest.raises(RequestError, match="block_ids"):
        states.append_blocks("a", [[null - 1]])
    assert states.block_tables[0].num_blocks[states.row_of("a")] == 1


@NULLS
def test_entries_that_hold_no_block_are_null_whatever_happens_to_rows(null):
    states = null_states(null)
    table = states.block_tables[0]
    assert (table.table == null).all()
    states.add_request(NewRequest("a", [1, 2, 3], [[5, 6]]))
    states.add_requests(
        NewRequests(
            req_ids=["b", "c"],
            token_ids=np.array([1, 2, 3, 4, 5], np.int32),
            num_tokens=np.array([3, 2], np.int32),
            block_ids=[np.array([7, 8, 9], np.int32)],
            num_blocks=[np.array([2, 1], np.int32)],
        )
    )
    states.append_blocks("a", [[10]])
    states.append_blocks_rows(np.array([states.row_of("c")], np.int32), np.array([11], np.int32), group=0)
    expected = {"a": [5, 6, 10], "b": [7, 8], "c": [9, 11]}

    def check() -> None:
        want = np.full((4, 6), null)
        for rid, blocks in expected.items():
            want[states.row_of(rid), : len(blocks)] = blocks
        assert np.array_equal(table.table, want)

    check()
    states.swap_rows(0, 3)
    check()
    states.remove_request("b")
    del expected["b"]
    check()
    states.condense()
    check()


# -- writes --------------------------------------------------------------------------------------------------------


@NULLS
@pytest.mark.parametrize("many", [False, True], ids=["add_request", "add_requests"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("computed", range(5))
@pytest.mark.parametrize("at", range(4))
def test_a_request_is_refused_whose_tokens_would_be_written_to_the_null_block(null, many, window, computed, at):
    """Blocks of 2: tokens ``computed`` … 4 are written, to blocks computed // 2 … 2. Block 3 is for later tokens."""
    states = null_states(null, KVGroup(2), KVGroup(2, sliding_window=window))
    blocks = [[3, 4, 5, 6], [null if k == at else k + 1 for k in range(4)]]

    def add():
        if not many:
            states.add_request(NewRequest("a", [1] * 5, blocks, num_computed_tokens=computed))
            return
        flat = [np.array(ids, np.int32) for ids in blocks]
        lengths, held = np.array([5], np.int32), np.array([4], np.int32)
        states.add_requests(
            NewRequests(
                req_ids=["a"], token_ids=np.ones(5, np.int32), num_tokens=lengths, block_ids=flat,
                num_blocks=[held, held], num_computed_tokens=np.array([computed], np.int32),
            )
        )  # fmt: skip

    if not any(position // 2 == at for position in range(computed, 5)):
        add()
        return
    with pytest.raises(RequestError, match=rf"block_ids\[1\]\[{at}\] = {null}: means no block") as caught:
        add()
    assert f"tokens {2 * at} … {2 * at + 1} would be written there" in str(caught.value)
    assert caught.value.request_id == "a"
    assert "a" not in states


@pytest.mark.one_in(5)
@every_check
@every_backend
@NULLS
@pytest.mark.parametrize("form", ["ids", "arrays"])
@pytest.mark.parametrize(
    ("blocks", "computed", "scheduled", "drafts"),
    [
        ([0], 0, 1, 0),  # the only block
        ([0, 4], 0, 4, 0),  # the first of two
        ([3, 0, 5], 1, 5, 0),  # between two
        ([3, 4, 0], 2, 3, 0),  # the last
        ([3, 4, 0], 4, 1, 0),  # over context
        ([3, 4, 0], 3, 2, 1),  # a draft alone
    ],
)
def test_a_write_to_the_null_block_is_refused(null, backend, check, form, blocks, computed, scheduled, drafts):
    states = null_states(null)
    states.add_request(NewRequest("other", [1], [[9]]))
    held = [block or 8 for block in blocks]
    row = states.add_request(
        NewRequest("a", [1] * (computed + scheduled - drafts), [held], num_computed_tokens=computed)
    )
    states.block_tables[0].replace(row, blocks.index(0), null)
    buffers = InputBuffers.for_states(states, 16)
    ids = {"a": [7] * drafts} if drafts else None
    if form == "arrays" and drafts:
        ids = np.array([[-1] * drafts, [7] * drafts], np.int32)
    plan = plan_of(states, {"other": 1, "a": scheduled}, form)
    tokens, known = states.token_ids.copy(), states.num_tokens.copy()
    with pytest.raises(PlanError, match="null block") as caught:
        prepare_inputs(states, plan, buffers, draft_tokens=ids, backend=backend, check=check)
    assert caught.value.request == "a"
    assert caught.value.tensor == "block_table[0]"
    assert np.array_equal(states.token_ids, tokens)
    assert np.array_equal(states.num_tokens, known)
    prepare_inputs(states, plan_of(states, {"other": 1}, form), buffers, backend=backend, check=check)


@every_check
@every_backend
@pytest.mark.parametrize("form", ["ids", "arrays"])
def test_an_appended_null_block_cannot_be_written(backend, check, form):
    states = null_states(0)
    states.add_request(NewRequest("a", [1, 2], [[4]]))
    buffers = InputBuffers.for_states(states, 16)
    plan = plan_of(states, {"a": 2}, form)
    states.commit(prepare_inputs(states, plan, buffers, backend=backend, check=check), {"a": [3]})
    states.append_blocks("a", [[0]])
    with pytest.raises(PlanError, match="null block"):
        prepare_inputs(states, plan_of(states, {"a": 1}, form), buffers, backend=backend, check=check)


@every_check
@every_backend
def test_block_zero_is_a_block_like_any_other_where_the_null_block_is_minus_one(backend, check):
    states = null_states(-1)
    states.add_request(NewRequest("a", [1, 2, 3], [[0, 2]]))
    states.add_request(NewRequest("b", [4], [[1]]))
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": 3, "b": 1}, buffers, backend=backend, check=check)
    assert batch.slot_mapping[0].tolist() == [0, 1, 4, 2]
    assert batch.block_table[0].tolist() == [[0, 2, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]
    states.commit(batch, {"a": [7], "b": [8]})
    batch = prepare_inputs(states, {"b": 1, "a": 1}, buffers, backend=backend, check=check)
    assert batch.slot_mapping[0].tolist() == [3, 5]


@every_backend
@NULLS
def test_one_null_block_in_any_group_is_found(null, backend):
    states = null_states(null, KVGroup(2), KVGroup(4, sliding_window=3), KVGroup(2, kernel_block_size=1))
    row = states.add_request(NewRequest("a", [1, 2, 3, 4, 5], [[1, 2, 3], [1, 2], [1, 2, 3]]))
    states.block_tables[1].replace(row, 1, null)
    buffers = InputBuffers.for_states(states, 16)
    prepare_inputs(states, {"a": 4}, buffers, backend=backend)
    with pytest.raises(PlanError, match="null block") as caught:
        prepare_inputs(states, {"a": 5}, buffers, backend=backend)
    assert caught.value.tensor == "block_table[1]"


# -- reads: sliding windows ----------------------------------------------------------------------------------------


@every_check
@every_backend
@NULLS
def test_null_blocks_below_the_window_are_legal(null, backend, check):
    """W = 3, 6 computed tokens: the first scheduled token sees positions 4 … 6, in entries 2 and 3."""
    states = null_states(null, KVGroup(2, sliding_window=3))
    states.add_request(NewRequest("a", [1] * 8, [[null, null, 7, 8]], num_computed_tokens=6))
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": 2}, buffers, backend=backend, check=check)
    assert batch.block_table[0].tolist() == [[null, null, 7, 8, null, null]]
    assert batch.slot_mapping[0].tolist() == [16, 17]
    states.commit(batch, {"a": [5]})
    states.append_blocks("a", [[9]])
    batch = prepare_inputs(states, {"a": 1}, buffers, backend=backend, check=check)
    assert batch.block_table[0].tolist() == [[null, null, null, 8, 9, null]]
