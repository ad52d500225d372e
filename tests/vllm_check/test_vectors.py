"""Inputs other than tokens: rotary positions of several dimensions, and prompt embeddings."""

from types import SimpleNamespace

import numpy as np
import pytest

from foreword.batch import KVGroup, NewRequest, RequestStates, stage_mrope_positions
from foreword.shadow import Shadow


@pytest.fixture
def shadow():
    states = RequestStates(max_num_reqs=2, max_model_len=32, vocab_size=50, kv_groups=[KVGroup(4)])
    return Shadow(states, max_num_batched_tokens=16, num_blocks=8)


def test_rotary_positions_follow_the_model_and_then_its_delta(shadow):
    shadow.states.add_request(NewRequest("a", [1, 2, 3], [[1, 2]]))
    rotary = np.array([[0, 5, 6], [0, 5, 7], [0, 6, 5]])
    stage_mrope_positions(shadow.states, "a", rotary, 4)
    shadow.plan({"a": 3})
    assert shadow.step(["a"], {"mrope_positions": rotary}) == []
    shadow.commit({"a": [9]})
    shadow.plan({"a": 1})
    [found] = shadow.step(["a"], {"mrope_positions": np.array([[7], [7], [8]])})
    assert (found.tensor, found.index, found.request, found.expected, found.got) == (
        "mrope_positions",
        (0, 2),
        "a",
        7,
        8,
    )


def test_embeddings_stand_where_the_prompt_has_them(shadow):
    embeds = np.arange(8, dtype=np.float32).reshape(4, 2)
    mask = np.array([True, False, False, True])
    shadow.states.add_request(NewRequest("a", [1, 0, 0, 4], [[1]], prompt_embeds=embeds, prompt_is_token_id=mask))
    shadow.plan({"a": 4})
    inputs = np.full((4, 2), 99, np.float32)  # what a model makes of tokens is not compared
    inputs[1:3] = embeds[1:3]
    assert shadow.step(["a"], {"prompt_embeds": inputs, "is_token_ids": mask}) == []
    shadow.commit({"a": [9]})
    shadow.states.add_request(NewRequest("b", [1, 0, 0, 4], [[2]], prompt_embeds=embeds, prompt_is_token_id=mask))
    shadow.plan({"b": 4})
    inputs[2, 1] = -1
    found = shadow.step(["b"], {"prompt_embeds": inputs, "is_token_ids": ~mask})
    assert {f.tensor: (f.index, f.got, f.count) for f in found} == {
        "prompt_embeds": ((2, 1), -1.0, 1),
        "is_token_ids": ((0,), False, 4),
    }


def test_the_rotary_positions_of_an_admitted_request_are_those_of_the_runner(shadow):
    from foreword.check_options import CheckOptions
    from foreword.vllm.follower import Follower

    follower = Follower(shadow, CheckOptions(), max_num_batched_tokens=16)
    data = SimpleNamespace(
        req_id="a", prompt_token_ids=[1, 2], mm_features=[], sampling_params=None, pooling_params=None,
        block_ids=([1],), num_computed_tokens=0, lora_request=None, prompt_embeds=None, prefill_token_ids=None,
    )  # fmt: skip
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=[],
        num_computed_tokens=[], num_output_tokens=[],
    )  # fmt: skip
    output = SimpleNamespace(
        scheduled_new_reqs=[data], scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 2},
        total_num_scheduled_tokens=2, scheduled_spec_decode_tokens={}, finished_req_ids=set(), preempted_req_ids=None,
    )  # fmt: skip
    follower.decide(output)
    rotary = np.array([[3, 4], [3, 5], [3, 6]])
    values = SimpleNamespace(is_ready=True, arrays=lambda: {"mrope_positions": rotary})
    follower.step(["a"], lambda: values, lambda: {"a": (rotary, 1)})
    assert (follower.failure, shadow.findings) == ("", ())
    assert shadow.report().num_tensors == 1
    follower.close()
