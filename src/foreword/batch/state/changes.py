"""Changes of the state that are made together: all of them, or none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import starmap
from operator import call
from typing import Any

Change = tuple[Any, ...]
"""A function in C, such as `operator.setitem` or `dict.pop`, and its arguments."""


def make(changes: Iterable[Change]) -> None:
    """Call each function with its arguments, in order. The arguments are computed and checked before.

    It is one call into C: signal handlers run between Python's instructions, so no interrupt comes between two changes.
    """
    deque(starmap(call, changes), maxlen=0)
