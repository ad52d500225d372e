"""Clients of one thread take turns."""

import threading
from threading import Event

import pytest

from foreword.engine.turns import Turns


def test_a_client_waits_for_one_function_of_every_other_client():
    turns, began, begin, order = Turns[None]("test"), Event(), Event(), []
    first = turns.submit("many", lambda: began.set() or (begin.wait(30) and None))
    assert began.wait(30)
    waiting = [turns.submit("many", lambda i=i: order.append(f"many {i}")) for i in range(4)]
    waiting += [turns.submit(name, lambda name=name: order.append(name)) for name in ("one", "other")]
    begin.set()
    for future in (first, *waiting):
        future.result(30)
    assert order == ["many 0", "one", "other", "many 1", "many 2", "many 3"]


def test_the_thread_ends_with_its_function_when_it_is_closed():
    turns, began, begin = Turns[int]("closed"), Event(), Event()
    running = turns.submit("a", lambda: began.set() or (begin.wait(30) and 1))
    waiting = [turns.submit(name, lambda: 2) for name in "ab"]
    assert began.wait(30)
    turns.close()
    begin.set()
    assert running.result(30) == 1
    assert all(future.cancelled() for future in waiting)
    for thread in (thread for thread in threading.enumerate() if thread.name.startswith("closed")):
        thread.join(30)
        assert not thread.is_alive()


def test_a_function_that_is_cancelled_or_fails_harms_no_other():
    turns, begin = Turns[int]("test"), Event()
    first = turns.submit("a", lambda: begin.wait(30) and 1)
    cancelled, failing, last = (turns.submit("a", function) for function in (lambda: 2, lambda: 1 // 0, lambda: 3))
    assert cancelled.cancel()
    begin.set()
    assert (first.result(30), last.result(30)) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
