"""The planner thread runs one function at a time, returns its result or error, and ends with its owner."""

from __future__ import annotations

import gc
import threading

import pytest

from foreword.engine.planner_thread import PlannerThread


def test_work_runs_in_another_thread_and_its_result_comes_back():
    planner: PlannerThread[int] = PlannerThread()
    for i in range(100):
        planner.start(lambda i=i: i * threading.get_ident())
        planner.wait()
        planner.wait()
        assert planner.result() not in (i * threading.get_ident(), None) or i == 0
    planner.close()


def test_an_error_of_the_work_is_raised_once_and_the_next_work_runs():
    planner: PlannerThread[int] = PlannerThread()

    def fail() -> int:
        raise MemoryError("no more memory")

    planner.start(fail)
    planner.wait()
    with pytest.raises(MemoryError):
        planner.result()
    planner.start(lambda: 7)
    planner.wait()
    assert planner.result() == 7
    planner.close()


def test_a_collected_planner_leaves_no_thread():
    before = set(threading.enumerate())
    planner: PlannerThread[int] = PlannerThread()
    planner.start(lambda: 1)
    planner.wait()
    (thread,) = set(threading.enumerate()) - before
    del planner
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()
