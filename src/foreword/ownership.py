"""Files in folders that others may write to: which follow from this user alone, and how to open only regular ones."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def is_own(status: os.stat_result) -> bool:
    """Return whether only this user and system users can have written the file, or a file in the folder."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. Raise OSError for any other, such as a pipe, whose
    writer would be waited for.
    """
    return _checked(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def open_lock(path: Path, mode: int = 0o666) -> int:
    """Open a regular file for reading and writing, and return its descriptor. It is made, with these permissions, if it
    is missing. Raise OSError for any other, also for a link, which would lead to a file of another folder.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(path, os.open(path, flags, mode))


def open_for_writing(path: Path, *, appends: bool = False, mode: int = 0o666) -> int:
    """Open a regular file to write it anew, or behind its end, and return its descriptor. It is made, with these
    permissions, if it is missing. Raise OSError for any other, also for a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(path, os.open(path, flags | (os.O_APPEND if appends else os.O_TRUNC), mode))


def check_regular(path: Path) -> None:
    """Raise OSError if there is a file that is not a regular one, or a link. It is not opened: to close it would end
    the locks that this process has on the file.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file: delete it", str(path))


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, also those above it, unless it is there. Raise OSError for a link or a file in its place."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OSError(errno.ENOTDIR, f"{path.name} is a link or a file in place of a folder: delete it", str(path))
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def _checked(path: Path, descriptor: int) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
