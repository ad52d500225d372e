"""Engines of one process take turns, in the order in which they ask."""

import threading
import time

from foreword.engine.step_turns import StepTurns


def test_steps_never_overlap_and_each_engine_has_its_turn_after_one_step_of_each_other():
    turns, inside, order = StepTurns(), [], []
    start, others = threading.Barrier(3), 2

    def engine(name):
        nonlocal others
        start.wait()
        for i in range(60):
            with turns:
                assert not inside
                inside.append(name)
                order.append(name)
                others -= i == 59
                while len(turns._waiting) < others:  # those that are not at their end ask meanwhile
                    time.sleep(0.0001)
                inside.pop()

    threads = [threading.Thread(target=engine, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 180
    assert all({*order[i : i + 3]} == {*"abc"} for i in range(175))  # a plain lock gives one engine most turns


def test_a_step_that_fails_gives_its_turn_back():
    turns = StepTurns()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass
    with turns:
        pass
