"""The common calls stay in native code: the Python code that stands for it where it refuses is not reached."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import test_vllm_apply
from batch_rig import states_and_buffers
from test_vllm_apply import cached_data, new_data, output

from foreword.batch import KVGroup, NewRequest, NewRequests, RequestStates, SamplingParams, advance, prepare_inputs
from foreword.batch.adapters.vllm import VllmAdapter, apply
from foreword.batch.prepare import input_batch
from foreword.batch.prepare.backends import native as native_backend
from foreword.batch.state import request_states
from foreword.batch.state.sampling_columns import SamplingColumns
from foreword.native import available

pytestmark = pytest.mark.skipif(not available(), reason="needs the native module")

INSTEAD = (
    (native_backend, "check"),  # a plan that native code refused
    (input_batch, "commits"),  # samples that it refused
    (RequestStates, "_admit"),  # columns of requests that it refused
    (SamplingColumns, "reset"),  # rows that it did not remove
    (request_states, "check_block_ids"),  # blocks that it did not append
    (VllmAdapter, "_apply_rest"),  # a scheduler's output that it did not apply
)


@pytest.fixture
def only_native(monkeypatch):
    for owner, name in INSTEAD:
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))


def test_a_life_of_requests_by_rows_stays_in_native_code(only_native):
    """Admission, chunks, decodes, drafts, appended blocks, steps in flight and removal."""
    states, buffers = states_and_buffers(KVGroup(4), KVGroup(2, sliding_window=3), rows=3, length=16, drafts=2)
    rows = states.add_requests(
        NewRequests(
            req_ids=["a", "b"],
            token_ids=np.arange(1, 9, dtype=np.int32),
            num_tokens=np.array([5, 3], np.int32),
            prompt_len=np.array([5, 2], np.int32),
            num_computed_tokens=np.array([0, 2], np.int32),
            block_ids=[np.array([1, 2, 3], np.int32), np.arange(1, 9, dtype=np.int32)],
            num_blocks=[np.array([2, 1], np.int32), np.array([5, 3], np.int32)],
            sampling={"temperature": np.array([0.5, 0], np.float32), "top_k": np.array([3, 0], np.int32)},
        )
    )

    def step(counts, sampled, drafts=None, *, ahead=False, **kw):
        scheduled = np.array(counts, np.int32)
        batch = prepare_inputs(states, (rows, scheduled), buffers, draft_tokens=drafts, backend="native", **kw)
        if ahead:
            advance(states, batch)
        states.commit(batch, sampled)

    step([3, 1], np.array([-1, 9], np.int32))
    step([2, 1], {"a": [7], "b": [8]})
    states.append_blocks_rows(rows, np.array([8, 9], np.int32), group=0)
    step([3, 1], np.array([[11, 6, -1], [5, -1, -1]], np.int32), np.array([[11, 12], [-1, -1]], np.int32))
    step([1, 1], np.array([4, 4], np.int32), ahead=True, pad_to=(8, 3), order="decode_first")
    states.sampling.set_columns(rows, {"temperature": np.array([0, 0.7], np.float32)})
    assert states.token_ids[rows[0], :9].tolist() == [1, 2, 3, 4, 5, 7, 11, 6, 4]
    states.remove_rows(rows)
    assert not states.live.any()


def test_a_life_of_requests_by_id_is_prepared_committed_and_removed_in_native_code(monkeypatch):
    states, buffers = states_and_buffers(rows=3, length=16, drafts=2)
    for name in "ab":
        states.add_request(NewRequest(name, [1, 2, 3], [[1, 2, 3]], sampling_params=SamplingParams(temperature=0.5)))
    for owner, name in INSTEAD:
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    batch = prepare_inputs(states, {"a": 3, "b": 2}, buffers, backend="native")
    states.commit(batch, {"a": [5]})
    batch = prepare_inputs(states, {"b": 1, "a": 3}, buffers, draft_tokens={"a": [6, 7]}, backend="native")
    states.commit(batch, {"a": [6, 8], "b": [4]})
    assert states.remove_request("a")
    assert states.req_ids == ("b",)


def test_the_outputs_of_a_vllm_scheduler_are_applied_in_native_code(only_native):
    """New requests with parameters, chunks, decodes with new blocks or none, drafts, finished ids."""
    states, buffers = test_vllm_apply.make()
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=3)

    def step(given, sampled):
        batch = prepare_inputs(states, apply(states, given), buffers, backend="native")
        states.commit(batch, sampled)
        return batch

    new = [
        new_data("a", [1, 2, 3, 4, 5], ([1, 2], [1, 2, 3, 10]), sampling_params=params),
        new_data("b", [6, 7], ([3], [4]), num_computed_tokens=1),
    ]
    step(output(new, scheduled={"a": 3, "b": 1}), {"b": [9]})
    running = cached_data([("a", None, 3, 0), ("b", ([], [5]), 2, 1)])
    step(output(cached=running, scheduled={"a": 2, "b": 1}), {"a": [8], "b": [10]})
    running = cached_data([("a", None, 5, 1), ("b", None, 3, 2)])
    drafts = {"a": [20, 21]}
    step(output(cached=running, scheduled={"a": 3, "b": 1}, drafts=drafts), {"a": [20, 22], "b": [11]})
    running = cached_data([("a", None, 7, 3)])
    third = [new_data("c", [1], ([4], [6]))]
    batch = step(output(third, running, {"a": 1, "c": 1}, finished=["b"]), {"a": [23], "c": [24]})
    assert batch.input_ids.tolist() == [22, 1]
    assert states.req_ids == ("a", "c")
    assert states.token_ids[states.row_of("a"), :8].tolist() == [1, 2, 3, 4, 5, 8, 20, 22]


HELD = """
import threading, typing
from foreword.batch import InputBuffers, KVGroup, RequestStates, NewRequest, prepare_inputs
states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(4)])
states.add_request(NewRequest("a", [1], [[1]]))
typing.held = prepare_inputs(states, {"a": 1}, InputBuffers.for_states(states, 8))
threading.Thread(target=lambda states=states: threading.Event().wait(), daemon=True).start()
"""


def test_states_that_live_until_the_exit_are_not_reported_as_leaks():
    run = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert run.stderr == ""
