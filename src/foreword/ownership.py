"""Files in folders that others may write to: which follow from this user alone, and how to open only regular ones."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_own(status: os.stat_result) -> bool:
    """Return whether only this user and system users can have written the file, or a file in the folder."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. Raise OSError for any other, such as a pipe, whose
    writer would be waited for.
    """
    return _checked(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def open_lock(path: Path) -> int:
    """Open a regular file for reading and writing, which is made if it is missing, and return its descriptor. Raise
    OSError for any other, also for a link, which would lead to a file of another folder.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(path, os.open(path, flags, 0o666))


def _checked(path: Path, descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
