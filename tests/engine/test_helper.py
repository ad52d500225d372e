"""The helper does one thing at a time, hands back what came of it, and is gone with its owner."""

from __future__ import annotations

import gc
import threading

import pytest

from foreword.engine.helper import Helper


def test_work_runs_in_another_thread_and_its_result_comes_back():
    helper: Helper[int] = Helper()
    for i in range(100):
        helper.start(lambda i=i: i * threading.get_ident())
        helper.wait()
        helper.wait()
        assert helper.result() not in (i * threading.get_ident(), None) or i == 0
    helper.close()


def test_what_the_work_raises_is_raised_once_and_the_next_work_runs():
    helper: Helper[int] = Helper()

    def fail() -> int:
        raise MemoryError("no more memory")

    helper.start(fail)
    helper.wait()
    with pytest.raises(MemoryError):
        helper.result()
    helper.start(lambda: 7)
    helper.wait()
    assert helper.result() == 7
    helper.close()


def test_a_forgotten_helper_leaves_no_thread():
    before = set(threading.enumerate())
    helper: Helper[int] = Helper()
    helper.start(lambda: 1)
    helper.wait()
    (thread,) = set(threading.enumerate()) - before
    del helper
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()
