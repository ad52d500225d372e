"""Threads, event loops and forks, in short form."""

import pytest
from programs import check_program


@pytest.mark.one_in(7)
@pytest.mark.parametrize("mode", ["cancel", "loops", "together", "threads", "foreign", "fork"])
def test_the_answers_are_right_or_the_call_is_refused(mode: str):
    check_program("async_storm", "--modes", mode, "--runs", "1", "--seed", "1")
