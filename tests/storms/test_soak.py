"""Mixed traffic, in short form."""

from programs import check_program


def test_mixed_traffic_loses_nothing_and_leaves_nothing():
    check_program("soak", "--steps", "1200", "--seed", "1")
