"""One step ahead: the same outputs, the same accounts, and the planning really happens beside the run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_rig import V, make_engine, run
from oracle_model import OracleExecutor

from foreword.batch import KVGroup, SamplingParams
from foreword.engine import EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError


def work(engine) -> None:
    for i in range(12):
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=3 + i % 5, n=1 + i % 2, logprobs=1)
        engine.add_request(str(i), [1 + j % 9 for j in range(5 + 2 * i)], params)


def test_depth_two_gives_the_outputs_of_depth_one():
    results = []
    for async_scheduling in (False, True):
        engine = make_engine(async_scheduling=async_scheduling, blocks=40, max_num_seqs=4)
        work(engine)
        results.append({i: [c.token_ids for c in o.outputs] for i, o in run(engine).items()})
        engine.close()
    assert results[0] == results[1]


def test_the_next_step_is_planned_while_one_runs():
    engine = make_engine(async_scheduling=True)
    running, planned = threading.Event(), threading.Event()
    execute, schedule = engine.executor.execute, engine.scheduler.schedule
    overlaps = []

    def slow(batch):
        running.set()
        overlaps.append(planned.wait(timeout=10))
        planned.clear()
        return execute(batch)

    def watched(in_flight=None):
        plan = schedule(in_flight)
        if in_flight is not None:
            running.wait(timeout=10)
            running.clear()
            planned.set()
        return plan

    engine.executor.execute, engine.scheduler.schedule = slow, watched
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    run(engine)
    assert overlaps == [True] * 4
    engine.close()


def test_a_request_that_certainly_ends_is_not_scheduled_again():
    engine = make_engine(async_scheduling=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    run(engine)
    assert engine.executor.num_steps == 5
    engine.close()


def test_a_request_that_ends_by_surprise_computes_nothing_more():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    engine.add_request("b", [4, 5, 6], SamplingParams(temperature=0.0, max_tokens=9))
    outputs = run(engine)
    expected = outputs["a"].outputs[0].token_ids
    eos = expected[3]
    engine = make_engine(async_scheduling=True, eos=[eos])
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=name == "b"))
    got = run(engine)
    assert got["a"].outputs[0].token_ids == expected[: expected.index(eos) + 1]
    assert got["b"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids
    engine.close()


def test_abort_waits_for_the_step_in_flight_and_keeps_its_tokens():
    engine = make_engine(async_scheduling=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    engine.add_request("b", [4, 5, 6], SamplingParams(temperature=0.0, max_tokens=9))
    engine.step()
    out = engine.abort("a")
    assert len(out.outputs[0].token_ids) == 2
    assert set(run(engine)) == {"b"}
    engine.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_step_reaches_the_caller_and_the_engine_goes_on(async_scheduling: bool):
    class Flaky(OracleExecutor):
        def execute(self, batch):
            if self.num_steps in (1, 4):
                self.num_steps += 1
                for memory in self.memory:
                    memory[:] = np.where(memory == -1, 77, memory)  # whatever it wrote is rubbish
                raise MemoryError("no more memory")
            return super().execute(batch)

    def outputs(executor):
        engine = make_engine(async_scheduling=async_scheduling, executor=executor, max_num_seqs=3)
        work(engine)
        failures, done = 0, {}
        while engine.has_work:
            try:
                done |= {o.request_id: [c.token_ids for c in o.outputs] for o in engine.step()}
            except MemoryError:
                failures += 1
        engine.close()
        assert engine.cache.pool.num_used == 0
        return failures, done

    failures, done = outputs(Flaky)
    assert failures == 2
    assert done == outputs(OracleExecutor)[1]


def test_a_window_keeps_what_the_step_in_flight_reads():
    groups = [KVGroup(4), KVGroup(4, sliding_window=5)]
    outputs = []
    for async_scheduling in (False, True):
        engine = make_engine(groups=groups, async_scheduling=async_scheduling, max_num_batched_tokens=6)
        for i in range(4):
            engine.add_request(str(i), [(i + j) % V for j in range(20)], SamplingParams(seed=i, max_tokens=20))
        outputs.append({i: o.outputs[0].token_ids for i, o in run(engine).items()})
        engine.close()
    assert outputs[0] == outputs[1]


def test_speculation_and_depth_two_exclude_each_other():
    with pytest.raises(ConfigError, match="choose one"):
        EngineConfig(async_scheduling=True, speculation=SpeculationConfig())
