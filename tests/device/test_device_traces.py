"""The tensors that the kernels make, and the rows on the device, over the random traffic of the other backends."""

import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import test_random_traces
from device_place import Device, host, to_device

from foreword.batch import RequestStates, prepare_inputs
from foreword.batch.prepare.commit import sample_table
from foreword.device import layout
from foreword.device.backend import DeviceBackend
from foreword.device.rows import DeviceRows

EXAMPLES = int(os.environ.get("FOREWORD_EXAMPLES", 6))


class Followed:
    """The device of each of some states, made with their first step."""

    def __init__(self, monkeypatch) -> None:
        self.rows: dict[int, DeviceRows] = {}
        self.steps = 0
        commit = RequestStates.commit

        def committed(states, batch, sampled):
            rows = self.rows.get(id(states))
            table = None if rows is None or batch._stage else sample_table(states, batch, sampled)
            reqs = batch.num_reqs_padded
            commit(states, batch, sampled)
            if table is not None:
                commit_on_device(rows, table, reqs)
                assert_equal_rows(rows)

        def prepared(states, plan, buffers, *, backend, **kw):
            if backend != "device":
                return prepare_inputs(states, plan, buffers, backend=backend, **kw)
            if id(states) not in self.rows:
                tokens = buffers.max_num_batched_tokens
                self.rows[id(states)] = DeviceRows(states, Device(), max_num_batched_tokens=tokens)
            self.steps += 1
            return prepare_inputs(
                states, plan, buffers, backend=DeviceBackend(self.rows[id(states)], commits=True), **kw
            )

        monkeypatch.setattr(RequestStates, "commit", committed)
        monkeypatch.setattr(test_random_traces, "prepare_inputs", prepared)
        monkeypatch.setattr(test_random_traces, "BACKENDS", ("loops", "native", "device"))


def commit_on_device(rows: DeviceRows, table, num_reqs: int) -> None:
    table = table[:, None] if table.ndim == 1 else table
    padded = np.full((rows.states.max_num_reqs, rows.width), -1, np.int32)
    padded[: len(table), : table.shape[1]] = table
    rows.tensors["sampled"].copy_(to_device(padded.ravel()))
    rows.commit(num_reqs)


def assert_equal_rows(rows: DeviceRows) -> None:
    """Every row that the device has, and that holds its request still, is the host's."""
    states, place = rows.states, rows.layout
    arena = host(rows.arena)
    records = arena[place.records_at :][: states.max_num_reqs * place.record_size].reshape(states.max_num_reqs, -1)
    known, is_embedding = rows.known_rows(), states.extras.is_embedding
    for row in np.flatnonzero(states.live & (known == states.row_generation)).tolist():
        assert records[row, layout.RECORD.index("num_tokens")] == states.num_tokens[row]
        assert records[row, layout.RECORD.index("num_computed_tokens")] == states.num_computed_tokens[row]
        v = states.num_tokens[row]
        tokens = states.token_ids[row, :v]
        if is_embedding is not None:
            tokens = np.where(is_embedding[row, :v], ~tokens, tokens)
        assert np.array_equal(host(rows.tokens)[row * states.max_model_len :][:v], tokens)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_every_tensor_of_every_step_equals_the_model(monkeypatch, seed):
    followed = Followed(monkeypatch)
    test_random_traces.run_random_lives(1000 + seed, 12)
    assert followed.steps == 12
