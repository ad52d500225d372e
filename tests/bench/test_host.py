"""The contenders of the host benchmark make equal tensors, and a step does not leak memory."""

import tracemalloc

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.bench import host
from foreword.bench.traffic import WORKLOADS


@pytest.mark.one_in(13)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_every_contender_makes_the_same_tensors(workload):
    (results,) = host.run(num_steps=8, chunk=2, workloads=(workload,))
    assert [r.engine for r in results] == ["foreword (native)", "foreword (numpy)", "python lists"]


def test_ten_thousand_steps_do_not_leak_memory():
    states = RequestStates(max_num_reqs=8, max_model_len=256, vocab_size=100, kv_groups=[KVGroup(block_size=16)])
    buffers = InputBuffers.for_states(states, 64)
    blocks = np.arange(1, 17, dtype=np.int32)
    ones, sampled = np.ones(8, np.int32), np.full(8, 5, np.int32)

    def life() -> None:
        rows = np.array([states.add_request(NewRequest(str(i), [1, 2, 3], [blocks])) for i in range(8)], np.int32)
        states.commit(prepare_inputs(states, (rows, 3 * ones), buffers), sampled)
        for _ in range(200):
            states.commit(prepare_inputs(states, (rows, ones), buffers), sampled)
        states.remove_rows(rows)

    life()
    tracemalloc.start()
    try:
        life()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            life()
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
