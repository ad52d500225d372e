"""Interrupts at random moments."""

import pytest
from programs import check_program


@pytest.mark.parametrize(
    ("mode", "runs"), [("lines", 16), ("planner", 8), ("signals", 8), ("burst", 8), ("thread", 8), ("steps", 16)]
)
def test_an_interrupt_at_any_moment_leaves_the_engine_as_before_a_step_or_after_it(mode: str, runs: int):
    check_program("interrupt_storm", "--modes", mode, "--runs", str(runs), "--seed", "1")
