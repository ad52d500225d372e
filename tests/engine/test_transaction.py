"""Two threads never change one owner at the same time, in whatever order they run."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import pytest

from foreword.engine.transaction import Transaction
from foreword.errors import EngineError


class Owner:
    """Counts its changes in progress."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.restored = 0
        self.transaction = Transaction(self, ("change", "leave_open"), self.restore)

    def restore(self) -> None:
        self.restored += 1

    def change(self) -> None:
        with self.transaction:
            self.inside += 1
            self.most = max(self.most, self.inside)
            for _ in range(5):
                pass
            self.inside -= 1

    def leave_open(self) -> None:
        """Begin a change whose end never runs, as an interrupt between two instructions does."""
        self.transaction.__enter__()


def hammer(owner: Owner, seconds: float, interruptions: bool = False) -> Counter[str]:
    """Call ``change`` from four threads that are switched at every instruction. Return the count per outcome."""
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < until:
            try:
                if interruptions and number == 0:
                    owner.leave_open()
                else:
                    owner.change()
                outcomes["done"] += 1
            except EngineError:
                outcomes["refused"] += 1
            except BaseException as error:
                outcomes[repr(error)] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return outcomes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interruptions", [False, True], ids=["all-end", "some-never-end"])
def test_two_threads_are_never_in_one_owner(interruptions: bool) -> None:
    owner = Owner()
    outcomes = hammer(owner, 1.0, interruptions)
    assert set(outcomes) <= {"done", "refused"}
    assert outcomes["done"]
    assert owner.most == 1
    assert owner.inside == 0
    owner.change()
    if not interruptions:
        assert owner.restored == 0


def test_a_change_after_one_that_never_ended_begins_with_its_restore() -> None:
    owner = Owner()
    owner.leave_open()
    owner.change()
    assert owner.restored == 1
    owner.change()
    assert owner.restored == 1


def test_a_restore_that_is_interrupted_runs_again_at_the_next_change() -> None:
    owner = Owner()
    owner.leave_open()
    restore, calls = owner.restore, []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise KeyboardInterrupt
        restore()

    owner.transaction = Transaction(owner, ("change", "leave_open"), interrupted)
    owner.leave_open()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            owner.change()
    owner.change()
    assert owner.restored == 1


def test_a_change_in_a_change_is_refused() -> None:
    owner = Owner()
    owner.restore = owner.change  # type: ignore[method-assign]
    owner.transaction = Transaction(owner, ("change", "leave_open"), owner.restore)
    owner.leave_open()
    with pytest.raises(EngineError, match="in the middle of a step"):
        owner.change()
