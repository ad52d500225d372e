"""Python's cyclic garbage collector while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Within the block, the collector does not run in any thread.

    It is for the import of modules and the load of a model, whose objects stay: collections would visit them again and
    again, which takes a tenth of the start of a server, and would find almost nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
