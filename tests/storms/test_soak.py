"""Mixed traffic, in short form."""

import pytest
from programs import check_program


@pytest.mark.long
def test_mixed_traffic_loses_nothing_and_leaves_nothing():
    check_program("soak", "--steps", "1200", "--seed", "1")
