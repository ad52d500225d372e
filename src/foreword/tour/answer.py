"""Run and check an answer to an exercise, which is a file of the reader."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

from foreword.tour.lesson import Exercise


def check(exercise: Exercise, path: Path) -> str:
    """Run a file and return the fault of its answer, "" if it is right. Raise OSError if it cannot be read.

    The file runs in this process, with all of its permissions.
    """
    path.read_bytes()
    try:
        names = runpy.run_path(str(path))
        return exercise.fault(names)
    except KeyError as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == str(path):
            return _raised(error, path)
        return f"the file does not define {error.args[0]}"
    except (Exception, SystemExit) as error:
        return _raised(error, path)


def _raised(error: Exception | SystemExit, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    at = f" in line {lines[-1]}" if lines else ""
    return f"it fails{at}: {type(error).__name__}: {error}"
