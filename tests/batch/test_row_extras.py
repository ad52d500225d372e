"""Tokens by position, adapters with name and path, and pooling states: what a row keeps of its request."""

from functools import partial

import numpy as np
import pytest
from batch_rig import every_backend, states_of

from foreword.batch import (
    InputBuffers,
    KVGroup,
    LoraRequest,
    NewRequest,
    NewRequests,
    PoolingParams,
    RequestError,
    get_token_id,
    lora_mapping,
    pooling_metadata,
    prepare_inputs,
)
from foreword.batch.adapters.vllm_preempted import preempt, resume
from foreword.errors import ConfigError

HIDDEN = 3
make = partial(states_of, KVGroup(16), length=16)


# -- tokens --------------------------------------------------------------------------------------------------------


@every_backend
def test_a_known_position_has_the_token_of_the_prompt_or_of_the_output(backend):
    states = make(drafts=2)
    buffers = InputBuffers.for_states(states, 16)
    states.add_request(NewRequest("other", [9], [[2]]))
    states.add_request(NewRequest("a", [5, 6, 7], [[1]], [8]))
    states.commit(prepare_inputs(states, {"a": 4}, buffers, backend=backend), {"a": [11]})
    states.commit(
        prepare_inputs(states, {"a": 3}, buffers, draft_tokens={"a": [12, 40]}, backend=backend), {"a": [12, 13]}
    )
    states.swap_rows(1, 3)
    assert [get_token_id(states, "a", p) for p in range(7)] == [5, 6, 7, 8, 11, 12, 13]
    prepare_inputs(states, {"a": 2}, buffers, draft_tokens={"a": [14]}, backend=backend)
    for position in (7, -1, 16):  # a draft is not a known token
        with pytest.raises(RequestError, match=f"position.*{position}"):
            get_token_id(states, "a", position)
    with pytest.raises(RequestError):
        get_token_id(states, "b", 0)


@pytest.mark.parametrize("mask", [None, [True, False, True]])
def test_a_position_given_as_an_embedding_has_no_token(mask):
    states = make()
    is_token = mask or [False] * 3
    states.add_request(
        NewRequest(
            "a", [5, 6, 7] if mask else None, [[1]], [8], prompt_embeds=np.ones((3, HIDDEN), np.float32),
            prompt_is_token_id=None if mask is None else np.array(mask),
        )
    )  # fmt: skip
    states.add_request(NewRequest("b", [1, 2, 3], [[2]]))
    for position, token in enumerate([5, 6, 7]):
        if is_token[position]:
            assert get_token_id(states, "a", position) == token
        else:
            with pytest.raises(RequestError, match="embedding"):
                get_token_id(states, "a", position)
    assert get_token_id(states, "a", 3) == 8
    assert [get_token_id(states, "b", p) for p in range(3)] == [1, 2, 3]
    states.remove_request("a")
    states.add_request(NewRequest("c", [4], [[3]]))
    assert get_token_id(states, "c", 0) == 4


# -- adapters ------------------------------------------------------------------------------------------------------


def test_an_adapter_has_name_and_path_while_a_request_uses_it():
    states, law = make(), LoraRequest(6, "law", "/adapters/law")
    states.add_request(NewRequest("number", [1], [[1]], lora_id=6))
    assert states.loras.request(6) is None
    states.add_request(NewRequest("a", [1], [[2]], lora_request=law))
    states.add_request(NewRequest("b", [1, 2], [[3]], lora_id=6, lora_request=law))
    held = states.loras.request(6)
    assert (held.lora_id, held.name, held.path) == (6, "law", "/adapters/law")
    assert states.lora_id[:3].tolist() == [6, 6, 6]
    assert states.loras.users(6) == ("number", "a", "b")
    assert states.loras.in_use == (6,)
    batch = prepare_inputs(states, {"b": 2, "a": 1}, InputBuffers.for_states(states, 8))
    assert lora_mapping(batch).tokens.tolist() == [6, 6, 6]
    for rid in ("b", "number"):
        states.remove_request(rid)
        assert states.loras.request(6).path == "/adapters/law"
    states.remove_request("a")
    assert states.loras.request(6) is None
    assert states.loras.in_use == ()
    assert states.lora_id.tolist() == [0] * 4
    states.add_request(NewRequest("c", [1], [[1]], lora_request=LoraRequest(6, "medicine")))
    assert (states.loras.request(6).name, states.loras.request(6).path) == ("medicine", "")


def test_a_preempted_request_brings_its_adapter_back():
    states, law = make(), LoraRequest(6, "law", "/adapters/law")
    states.add_request(NewRequest("a", [1], [[1]], lora_request=law))
    kept = preempt(states, "a")
    assert states.loras.request(6) is None
    resume(states, kept, [[2]], 0)
    assert states.loras.request(6).name == "law"
    assert states.loras.users(6) == ("a",)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"lora_id": 7, "lora_request": LoraRequest(6, "law")}, "lora_id"),
        ({"lora_request": LoraRequest(6, "medicine")}, "in use for adapter 'law'"),
        ({"lora_request": LoraRequest(6, "law", "/other")}, "in use for adapter 'law'"),
        ({"lora_request": "law"}, "expected a LoraRequest"),
        ({"lora_request": 6}, "expected a LoraRequest"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_changes(request_, said):
    states = make()
    states.add_request(NewRequest("a", [1], [[1]], lora_request=LoraRequest(6, "law")))
    with pytest.raises(RequestError, match=said):
        states.add_request(NewRequest("b", [1], [[2]], **request_))
    assert states.req_ids == ("a",)
    assert states.loras.users(6) == ("a",)
    assert states.loras.request(6).name == "law"


@pytest.mark.parametrize("core", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("column", [[-1, 2], [2, 2**40], [1.0, 2.5], ["a", "b"], [[1], [2]], [1]])
def test_a_column_of_adapters_that_are_none_admits_no_request(column, core):
    states = make()
    if not core:
        states._core = states.sampling.core = None
    ones = np.ones(2, np.int32)
    with pytest.raises(RequestError, match="lora_id"):
        states.add_requests(
            NewRequests(req_ids=["a", "b"], token_ids=ones, num_tokens=ones, block_ids=[ones], num_blocks=[ones],
                        lora_id=np.array(column))
        )  # fmt: skip
    assert (states.req_ids, states.loras.in_use, states.lora_id.tolist()) == ((), (), [0] * 4)


@pytest.mark.parametrize("number", [0, -1, 2**31, "6", 1.0, None])
def test_the_number_of_an_adapter_begins_at_one(number):
    with pytest.raises(ConfigError, match="lora_id"):
        LoraRequest(number, "law")


# -- pooling -------------------------------------------------------------------------------------------------------


@every_backend
def test_a_pooling_request_keeps_its_chunks_until_its_last_one(backend):
    """Chunks of two requests in turn, with a move between: each state has the vectors of its own positions."""
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    vectors = {"p": np.arange(21.0).reshape(7, HIDDEN), "q": np.arange(15.0).reshape(5, HIDDEN) + 100}
    states.add_request(NewRequest("text", [1], [[9]]))
    for i, (rid, rows) in enumerate(vectors.items()):
        states.add_request(
            NewRequest(rid, [1] * len(rows), [[i + 1]], pooling_params=PoolingParams(task="score", dimensions=i))
        )
    results = {}
    for step, plan in enumerate(({"q": 2, "p": 3}, {"p": 3, "text": 1, "q": 1}, {"q": 2}, {"p": 1})):
        batch = prepare_inputs(states, plan, buffers, backend=backend)
        pooling = pooling_metadata(batch)
        ids = [rid for rid in plan if rid in vectors]
        assert [batch.req_ids[b] for b in pooling.batch_indices] == ids
        for i, rid in enumerate(ids):
            c = int(batch.num_computed_tokens[pooling.batch_indices[i]])
            state, params = pooling.states[i], pooling.params[i]
            assert state is states.extras.pooling_states[states.row_of(rid)]
            assert params is states.extras.pooling_params[states.row_of(rid)]
            assert sum(map(len, state.chunks)) == c
            state.append(vectors[rid][c : c + plan[rid]])
            if pooling.is_last_chunk[i]:
                results[rid] = state.take()
                assert state.chunks == []
        states.commit(batch, {})
        if step == 1:
            states.swap_rows(states.row_of("p"), 3)
    assert {rid: rows.tolist() for rid, rows in results.items()} == {rid: v.tolist() for rid, v in vectors.items()}


def test_the_step_has_what_earlier_chunks_left():
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    for i, rid in enumerate(("p", "q")):
        states.add_request(NewRequest(rid, [1] * 4, [[i + 1]], pooling_params=PoolingParams()))
        states.extras.pooling_states[i].append(np.full((2, 1), 10 * i + 1))
        states.extras.pooling_states[i].append(np.full((1, 1), 10 * i + 2))
    got = pooling_metadata(prepare_inputs(states, {"q": 1, "p": 1}, buffers))
    assert [[chunk.tolist() for chunk in state.chunks] for state in got.states] == [
        [[[11], [11]], [[12]]],
        [[[1], [1]], [[2]]],
    ]


def test_a_pooling_state_leaves_with_its_request_and_is_empty_after_a_preemption():
    states = make()
    states.add_request(NewRequest("p", [1] * 4, [[1]], pooling_params=PoolingParams(task="score")))
    states.add_request(NewRequest("q", [1] * 4, [[2]], pooling_params=PoolingParams()))
    held = states.extras.pooling_states
    held[0].append(np.ones((2, HIDDEN)))
    held[1].append(np.ones((1, HIDDEN)))
    kept = preempt(states, "p")
    assert list(held) == [1]
    states.add_request(NewRequest("text", [1], [[3]]))  # takes the row
    assert list(held) == [1]
    row = resume(states, kept, [[4]], 0)
    assert sorted(held) == sorted((1, row))
    assert held[row].chunks == []
    assert states.extras.pooling_params[row].task == "score"
    assert len(held[1].chunks) == 1
    states.remove_request("q")
    states.remove_request("p")
    assert held == {}
    assert states.extras.pooling_params == {}
