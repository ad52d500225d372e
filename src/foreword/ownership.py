"""Tell files that follow from this user alone from those that others may have written."""

from __future__ import annotations

import os
import stat


def is_own(status: os.stat_result) -> bool:
    """Return whether nobody but this user and the system's can have written the file, or a file in the folder."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
