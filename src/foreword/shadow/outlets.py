"""The further outputs of FOREWORD_CHECK: a recording, and a report that is kept up to date."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foreword.batch import RequestStates
from foreword.check_options import CheckOptions
from foreword.shadow.finding import Finding, raise_finding
from foreword.shadow.recording import Recording
from foreword.shadow.shadow import Shadow

REPORT_EVERY = 1.0
"""Seconds after which the file of the report is written again."""


def shadow_of(states: RequestStates, options: CheckOptions, *, log: Callable[[str], None], **others: Any) -> Shadow:
    """Return a shadow of these states with the given options. others: further arguments of `Shadow`."""
    return Shadow(
        states,
        check=options.level,
        every=options.every,
        first=options.first,
        on_finding=raise_finding if options.raises else lambda finding: log(str(finding)),
        **others,
    )


class Outlets:
    """The files of a checked engine: `step` and `commit` after those of its shadow, `close` at the end.

    title: the engine's name and version. report: returns the text of the report, which is written to its file and
    logged at the end. log: logs once if a file cannot be written.
    """

    def __init__(
        self,
        shadow: Shadow,
        options: CheckOptions,
        *,
        title: str,
        max_num_batched_tokens: int,
        log: Callable[[str], None],
        report: Callable[[], str],
        at_end: Callable[[str], None],
    ) -> None:
        self._shadow, self._path, self._report, self._at_end = shadow, options.report, report, at_end
        self._written, self._is_closed = 0.0, False
        self._recording = None
        if options.record is not None:
            self._recording = Recording(options.record, shadow.states, max_num_batched_tokens, log, title)
        self.write_report()
        atexit.register(self.close)

    def step(self, tensors: Mapping[str, Any], found: Sequence[Finding], preempted: Collection[str] = ()) -> None:
        """Record the step that was just compared. preempted: the requests that left and will be admitted again."""
        batch = self._shadow.batch
        if self._recording is not None and batch is not None:
            self._recording.step(batch, tensors, found, preempted)
        if found or time.monotonic() >= self._written + REPORT_EVERY:
            self.write_report()

    def commit(self, sampled: Mapping[str, Sequence[int]]) -> list[Finding]:
        """Give the samples of the step to the shadow, record them, and return the shadow's findings."""
        is_prepared = self._shadow.batch is not None
        found = self._shadow.commit(sampled)
        if self._recording is not None and is_prepared:
            self._recording.commit(sampled)
        if found:
            self.write_report()
        return found

    def write_report(self) -> None:
        """Write the file of the report, if there is one. The log has the findings if it cannot be written."""
        self._written = time.monotonic()
        if self._path is not None:
            with suppress(OSError):
                write_whole(self._path, self._report() + "\n")

    def close(self) -> None:
        """Finish the files, and log the report. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self.write_report()
        report = self._report()
        if self._recording is not None:
            self._recording.close()
        self._shadow.close()
        self._at_end(report)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none. Raise OSError if it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with part.open("x") as file:  # never through a link of this name
        file.write(text)
    part.replace(path)
