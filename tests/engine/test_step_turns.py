"""Engines of one process take turns, in the order in which they ask."""

import threading
import time

from foreword.engine.step_turns import StepTurns


def test_steps_never_overlap_and_each_engine_has_its_turn_after_one_step_of_each_other():
    turns, inside, order = StepTurns(), [], []
    start = threading.Barrier(3)

    def engine(name):
        start.wait()
        for _ in range(60):
            with turns:
                assert not inside
                inside.append(name)
                order.append(name)
                time.sleep(0.0003)  # others ask meanwhile
                inside.pop()

    threads = [threading.Thread(target=engine, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 180
    middle = order[20:120]  # all three ask for turns there, and a plain lock gives one engine most of them
    assert all(middle.count(name) >= 25 for name in "abc")


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
