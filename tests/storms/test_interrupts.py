"""Interrupts at random moments."""

from __future__ import annotations

import pytest
from programs import check_program


@pytest.mark.parametrize(
    ("mode", "runs"),
    [("lines", 40), ("planner", 15), ("signals", 20), ("burst", 10), ("thread", 10), ("steps", 40)],
)
def test_an_interrupt_at_any_moment_leaves_the_engine_as_before_a_step_or_after_it(mode: str, runs: int):
    check_program("interrupt_storm", "--modes", mode, "--runs", str(runs), "--seed", "1")
