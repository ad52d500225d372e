"""Host callables that raise at one of their calls."""

import pytest
from programs import check_program


@pytest.mark.long
def test_a_callable_that_raises_harms_no_request_but_its_own():
    check_program("fault_storm", "--runs", "1", "--seed", "1")
