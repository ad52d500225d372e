"""The collector of cycles pauses while a process starts."""

import gc
import sys

import pytest
import typer

from foreword.cli.app import app
from foreword.collector import without_collections


class Node:
    def __init__(self) -> None:
        self.itself = self


def collections_during_many_cycles() -> int:
    """Make more cycles than start a collection, and return how many collections ran meanwhile."""
    before = sum(one["collections"] for one in gc.get_stats())
    for _ in range(2 * gc.get_threshold()[0]):
        Node()
    return sum(one["collections"] for one in gc.get_stats()) - before


def test_nothing_is_collected_in_the_block():
    assert collections_during_many_cycles() > 0
    with without_collections():
        assert collections_during_many_cycles() == 0
    assert collections_during_many_cycles() > 0


def test_the_collector_runs_again_after_an_error():
    with pytest.raises(KeyError), without_collections():
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_turned_the_collector_off_keeps_it_off():
    gc.disable()
    try:
        with without_collections(), without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def is_visited(value: object) -> bool:
    return any(one is value for one in gc.get_objects())


def test_the_collector_does_not_visit_the_modules_of_a_command_while_it_runs():
    command = typer.main.get_command(app).commands["explain"]
    with command.make_context("explain", []):
        modules = sys.modules["foreword.cli.explain"].__dict__
        assert not is_visited(modules)
        assert gc.isenabled()
    assert is_visited(modules)
