"""Write a lesson as text for a terminal, and as a page of Markdown with pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from foreword.tour.lesson import Code, Lesson, Shown
from foreword.tour.lessons import LESSONS

WIDTH = 100  # characters of a line without a terminal


def as_text(number: int, width: int | None) -> str:
    """Return a lesson in lines of this width. number: from 1."""
    lesson, width = LESSONS[number - 1], width or WIDTH
    parts = [f"{number}. {lesson.title}"]
    for part in lesson.parts:
        match part:
            case Shown():
                parts += [_wrapped(f"{part.caption}:", width), textwrap.indent(part.table(width - 2), "  ")]
            case Code():
                parts.append(textwrap.indent(part.source.rstrip(), "    "))
            case str():
                parts.append(_wrapped(part, width))
    start = textwrap.indent(lesson.exercise.start.rstrip(), "    ")
    parts += [_wrapped(f"Exercise. {lesson.exercise.task} Begin with:", width), start]
    check = f"Check it with: foreword tour {number} --check FILE. Or see foreword tour {number} --hint, or --solution."
    return "\n\n".join([*parts, _wrapped(check, width)]) + "\n"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def file_name(number: int) -> str:
    """Return the name of a lesson's page."""
    return f"{number}-{LESSONS[number - 1].name}.md"


def pictures(number: int) -> dict[str, Shown]:
    """Return file name → picture of a lesson's page."""
    lesson = LESSONS[number - 1]
    shown = [part for part in lesson.parts if isinstance(part, Shown) and part.picture is not None]
    return {f"{number}-{lesson.name}-{i}.svg": part for i, part in enumerate(shown, 1)}


def as_page(number: int) -> str:
    """Return a lesson as Markdown."""
    lesson = LESSONS[number - 1]
    return "\n".join(_page_lines(number, lesson))


def _page_lines(number: int, lesson: Lesson) -> Iterator[str]:
    files = iter(pictures(number))
    yield from (f"# {number}. {lesson.title}", "")
    for part in lesson.parts:
        match part:
            case Shown(caption=caption, table=table, picture=picture):
                if picture is not None:
                    yield from (f"![{caption}]({next(files)})", "")
                yield from (f"{caption}:", "", "```text", table(WIDTH), "```", "")
            case Code(source=source):
                yield from ("```python", source.rstrip(), "```", "")
            case str():
                yield from (_wrapped(_escaped(part), 120), "")
    exercise = lesson.exercise
    yield from ("## Exercise", "", _wrapped(_escaped(exercise.task), 120), "", "```python", exercise.start.rstrip())
    yield from ("```", "", f"`foreword tour {number} --check FILE` checks your file.", "")
    for title, text in (
        ("Hint", _wrapped(_escaped(exercise.hint), 120)),
        ("Solution", f"```python\n{exercise.solution.rstrip()}\n```"),
    ):
        yield from (f"<details><summary>{title}</summary>", "", text, "", "</details>", "")
    ways = [f"[{n}. {LESSONS[n - 1].title}]({file_name(n)})" for n in (number - 1, number + 1) if 0 < n <= len(LESSONS)]
    yield from (" · ".join([*ways, "[all lessons](README.md)"]), "")


def _escaped(text: str) -> str:
    """Return a text in which no character has a meaning of Markdown; parts in ` are left as they are."""
    parts = text.split("`")
    parts[::2] = [part.replace("_", r"\_").replace("*", r"\*").replace("[", r"\[") for part in parts[::2]]
    return "`".join(parts)


def index() -> str:
    """Return the page that lists the lessons, as Markdown."""
    lines = [f"{n}. [{lesson.title}]({file_name(n)})" for n, lesson in enumerate(LESSONS, 1)]
    return "\n".join(
        [
            "# A tour of one step",
            "",
            "Eight short lessons on what an engine does before the forward pass, with three requests of a few words.",
            "Every table and picture is made from a real step of the library. Each lesson ends with an exercise:",
            "write a small file, and `foreword tour N --check FILE` says whether it is right. `foreword tour N` prints",
            "lesson N in a terminal, and `foreword tour list` the titles. `make pages` writes these pages.",
            "",
            *lines,
            "",
        ]
    )
