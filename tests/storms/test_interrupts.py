"""Interrupts at random moments, in short form: ``make storms`` has 2,000 of each."""

import pytest
from programs import check_program


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("modes", "runs"), [("lines,steps", 4), ("planner,signals,burst,thread", 4)])
def test_an_interrupt_at_any_moment_leaves_the_engine_as_before_a_step_or_after_it(modes: str, runs: int):
    check_program("interrupt_storm", "--modes", modes, "--runs", str(runs), "--seed", "1")
