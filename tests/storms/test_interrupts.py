"""Interrupts at random moments, in short form: ``make storms`` has 2,000 of each."""

import pytest
from programs import check_program


@pytest.mark.parametrize(
    ("mode", "runs"), [("lines", 8), ("planner", 4), ("signals", 4), ("burst", 4), ("thread", 4), ("steps", 8)]
)
def test_an_interrupt_at_any_moment_leaves_the_engine_as_before_a_step_or_after_it(mode: str, runs: int):
    check_program("interrupt_storm", "--modes", mode, "--runs", str(runs), "--seed", "1")
