"""The planner thread runs one function at a time, returns its result or error, and ends with its owner."""

import gc
import sys
import threading
import time

import pytest

from foreword.engine.planner_thread import PlannerThread


@pytest.fixture
def planner():
    thread: PlannerThread[int] = PlannerThread()
    yield thread
    thread.close()


def test_work_runs_in_another_thread_and_its_result_comes_back(planner):
    threads = set()
    for i in range(100):
        planner.start(lambda i=i: threads.add(threading.get_ident()) or i)
        assert planner.wait() == (i, None)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_an_error_of_the_work_comes_back_once_and_the_next_work_runs(planner):
    def fail() -> int:
        raise MemoryError("no more memory")

    planner.start(fail)
    value, error = planner.wait()
    assert value is None
    assert isinstance(error, MemoryError)
    planner.start(lambda: 7)
    assert planner.wait() == (7, None)


@pytest.mark.parametrize("waited", [0, 1, 2])
def test_after_settling_nothing_runs_and_no_outcome_is_left(planner, waited):
    done = []
    for i in range(2):
        planner.start(lambda i=i: time.sleep(0.01) or done.append(i))
    for _ in range(waited):
        planner.wait()
    planner.settle()
    assert done == [0, 1]
    planner.start(lambda: 7)
    assert planner.wait() == (7, None)


def test_a_collected_planner_leaves_no_thread():
    planner: PlannerThread[int] = PlannerThread()
    planner.start(threading.get_ident)
    ident, _ = planner.wait()
    assert ident in sys._current_frames()
    del planner
    gc.collect()
    end = time.monotonic() + 30
    while ident in sys._current_frames():
        assert time.monotonic() < end
        time.sleep(0.001)
