"""Calibration: the measured shapes, and the cost model fitted to an executor with known costs."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foreword.batch import KVGroup
from foreword.bench.calibrate import Shape, fit, measure, shapes
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.executors import HostExecutor
from foreword.simulation import CostModel

LIMITS = {"max_model_len": 300, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_context_tokens": 1500}


class Clockwork(HostExecutor):
    """An executor whose steps take the time of a cost model, on a clock of its own."""

    def __init__(self, truth: CostModel) -> None:
        super().__init__()
        self.truth, self.now = truth, 0.0
        self.contexts: list[int] = []

    def clock(self) -> float:
        return self.now

    def compute(self, batch, logits_indices):
        tables = [t[: batch.num_reqs] for t in batch.block_table]
        held = np.concatenate([t[t > 0] for t in tables])
        assert len(np.unique(held)) == len(held)  # no block is shared
        context = int(batch.seq_lens[: batch.num_reqs].sum())
        self.contexts.append(context)
        self.now += self.truth.seconds(batch.num_tokens, context)
        return np.zeros((len(logits_indices), 50), np.float32)

    def copy_blocks(self, sources, destinations):
        raise AssertionError("nothing to copy")


def test_shapes_stay_within_the_limits_and_determine_the_costs():
    found = shapes(**LIMITS)
    assert all(s.num_computed + s.num_new < 300 and s.num_tokens <= 64 and s.num_context_tokens <= 1500 for s in found)
    assert all(s.num_reqs <= 8 for s in found)
    assert len(set(found)) == len(found)
    columns = np.array([(1, s.num_tokens, s.num_context_tokens) for s in found])
    assert np.linalg.matrix_rank(columns) == 3


@pytest.mark.parametrize("groups", [[KVGroup(4)], [KVGroup(4), KVGroup(8, sliding_window=16)]])
def test_the_fitted_costs_are_those_of_the_executor(groups):
    truth = CostModel(step=2e-3, token=3e-5, context=4e-7)
    executor = Clockwork(truth)
    steps = list(
        measure(
            executor,
            shapes(**LIMITS),
            vocab_size=50,
            max_model_len=300,
            kv_groups=groups,
            num_blocks=700,
            clock=executor.clock,
        )
    )
    cost, error = fit(steps)
    assert (cost.step, cost.token, cost.context) == pytest.approx((truth.step, truth.token, truth.context))
    assert error < 1e-9
    assert {s.shape.num_context_tokens for s in steps} == set(executor.contexts)


def test_shapes_larger_than_the_pool_are_not_measured():
    executor = Clockwork(CostModel())
    wanted = [Shape(1, 4, 0), Shape(8, 1, 100), Shape(1, 1, 299)]
    steps = list(measure(executor, wanted, vocab_size=50, max_model_len=300, kv_groups=[KVGroup(4)], num_blocks=20))
    assert [s.shape for s in steps] == wanted[:1]
    with pytest.raises(ConfigError, match="1 measured steps"):
        fit(steps)


def test_states_of_measured_requests_are_in_slots_after_the_blocks():
    shape, groups = Shape(3, 2, 7), [KVGroup(4), KVGroup(4, recurrent=True)]
    assert [shape.fits(groups, *pool) for pool in ((10, 3), (9, 3), (10, 2), (13, 0), (12, 0))] == [
        True, False, False, True, False,
    ]  # fmt: skip
    for first_state, blocks, slots in ((10, range(1, 10), [10, 11, 12]), (1, None, [4, 8, 12])):
        states, _ = shape.admit(vocab_size=5, max_model_len=20, kv_groups=groups, first_state=first_state)
        keys, own = (table.table[:, : table.num_blocks[0]] for table in states.block_tables)
        assert blocks is None or keys.ravel().tolist() == list(blocks)
        assert own.ravel().tolist() == slots


def test_a_simulation_uses_the_saved_costs(tmp_path: Path):
    trace, cost = tmp_path / "a.jsonl", tmp_path / "cost.json"
    rows = [{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [1]}] * 2
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    CostModel(step=2.0, token=0.0, context=0.0).write(cost)
    args = ["simulate", "--trace", str(trace), "--cost", str(cost), "--policies", "fcfs,shortest-first", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    reports = [json.loads(line) for line in result.output.splitlines()]
    assert [r["policy"] for r in reports] == ["fcfs", "shortest-first"]
    assert all(r["seconds"] == 6.0 and r["leaked_blocks"] == 0 for r in reports)
    assert all(0 < r["peak_memory_use"] <= 1 and r["memory_use"] for r in reports)
    table = CliRunner().invoke(app, args[:-1])
    assert table.exit_code == 0
    assert table.output.count("blocks in use over time") == 2
