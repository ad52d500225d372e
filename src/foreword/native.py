"""The native module, imported in this one place. Where it is not built `available()` is False and ``native`` None."""

import os

try:
    from foreword import _native as native
except ImportError:
    native = None  # type: ignore[assignment]


NATIVE_FILE = os.stat(__file__ if native is None else native.__file__)
"""The state of the module's file when it was loaded: what has its place later may be other code."""

__all__ = ["NATIVE_FILE", "available", "native"]


def available() -> bool:
    """Return whether the native module is built and can be loaded."""
    return native is not None
