"""The progress bar of a batch run, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

WIDTH = 30  # characters of the bar


class Advance(Protocol):
    """A function that gets how many requests have finished, and how many tokens were generated."""

    def __call__(self, finished: int, generated_tokens: int) -> None: ...


@contextmanager
def progress_bar(total: int, *, show: bool | None) -> Iterator[Advance]:
    """Yield a function to call with increments. With ``show`` None, only a terminal shows the bar."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda finished, generated_tokens: None
        return
    start, done, tokens = time.perf_counter(), 0, 0

    def advance(finished: int, generated_tokens: int) -> None:
        nonlocal done, tokens
        done, tokens = done + finished, tokens + generated_tokens
        seconds = max(time.perf_counter() - start, 1e-9)
        bar = "━" * (WIDTH * done // total)
        times = f"{seconds:.0f} s, {seconds * (total - done) / done:.0f} s left" if done else ""
        line = f"requests {bar:{WIDTH}} {done}/{total} {times} {tokens / seconds:.0f} tokens/s"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print(file=sys.stderr)
