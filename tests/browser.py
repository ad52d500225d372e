"""A browser for tests of pages, driven by playwright: Debian's chromium-headless-shell, or Google Chrome."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAM = shutil.which("chromium-headless-shell") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator:
    """A running browser; without playwright or the program the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if PROGRAM is None:
        pytest.skip("neither chromium-headless-shell nor google-chrome is installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def tab(started, **options) -> Iterator:
    """A tab of its own, with options of playwright's `new_context`; its `errors` are of its scripts and its policy."""
    context = started.new_context(**options)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda line: page.errors.append(line.text) if _is_fault(line) else None)
    yield page
    context.close()


def _is_fault(line) -> bool:
    """Return whether a line of the console is an error, and not the status of a response."""
    return line.type == "error" and not line.text.startswith("Failed to load resource")
