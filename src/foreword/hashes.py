"""Hashes of short data, by the functions of Python that `hashlib` wraps, since it loads OpenSSL: 4 MB of memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash, blake2b, sha256
else:
    try:
        from _blake2 import blake2b

        if sys.version_info >= (3, 12):
            from _sha2 import sha256
        else:
            from _sha256 import sha256
    except ImportError:  # a Python that is built without them
        from hashlib import blake2b, sha256

__all__ = ["blake2b", "sha256", "sha256_of_files"]


def sha256_of_files() -> _Hash:
    """Return a hash of no bytes, of OpenSSL: for megabytes it takes a fraction of the time of `sha256`."""
    import hashlib

    return hashlib.sha256()
