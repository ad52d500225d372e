"""Progress of a download."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""A function that is called with (bytes received, bytes in total)."""


@contextlib.contextmanager
def download_bar(label: str) -> Iterator[Progress]:
    """Make a progress bar on standard error, which is shown only on a terminal."""
    from rich import progress  # takes 0.1 s to import, which every start would pay for
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda here, total: bar.update(task, completed=here, total=total)
