"""The progress bar of a batch run, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    def __call__(self, finished: int, generated_tokens: int) -> None: ...


@contextmanager
def progress_bar(total: int, *, show: bool | None) -> Iterator[Advance]:
    """Yields a function to call with what was added. show: None shows it where standard error is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda finished, generated_tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total, rate="")
        tokens = 0

        def advance(finished: int, generated_tokens: int) -> None:
            nonlocal tokens
            tokens += generated_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=finished, rate=f"{tokens / elapsed:.0f} tokens/s" if elapsed > 0 else "")

        yield advance
