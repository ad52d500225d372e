"""Helpers of tests that compile a model, and the warnings of what PyTorch imports for it."""

import shutil
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., object])
_MARKS = (
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:Distutils was imported",  # these two: of setuptools, if another module imported distutils before it
        "ignore:Setuptools is replacing distutils",
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++"),
)


def compiles(test: T) -> T:
    """Mark a test that runs torch.compile."""
    for mark in _MARKS:
        test = mark(test)
    return test
