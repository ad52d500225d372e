"""The native module, imported in this one place. Where it is not built `available()` is False and ``native`` None."""

try:
    from foreword import _native as native
except ImportError:
    native = None  # type: ignore[assignment]


__all__ = ["available", "native"]


def available() -> bool:
    """Return whether the native module is built and can be loaded."""
    return native is not None
