"""The pages of the tour, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from foreword.tour.lesson import Shown
from foreword.tour.lessons import LESSONS
from foreword.tour.pages import as_page, file_name, index, pictures


def _files() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "README.md", index
    for number in range(1, len(LESSONS) + 1):
        yield file_name(number), lambda number=number: as_page(number)
        for name, shown in pictures(number).items():
            yield name, lambda shown=shown: _picture(shown)


def _picture(shown: Shown) -> str:
    assert shown.picture is not None, f"{shown.caption}: has no picture"
    return shown.picture()


PAGES: dict[str, Callable[[str], str]] = {
    f"docs/tour/{name}": lambda page, make=make: make() for name, make in _files()
}
