"""`foreword tour`: lessons about a step, and a check of their exercises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.terminal import print_text, terminal_width
from foreword.tour.answer import check as check_answer
from foreword.tour.lessons import LESSONS
from foreword.tour.pages import as_text


def tour(
    lesson: Annotated[
        str,
        typer.Argument(
            metavar="N|list",
            help=f"The number of a lesson, 1 to {len(LESSONS)}, or list. [default: 1]",
            show_default=False,
        ),
    ] = "1",
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this file, and check your answer to the lesson's exercise.")
    ] = None,
    hint: Annotated[bool, typer.Option("--hint", help="Show a hint for the exercise.")] = False,
    solution: Annotated[bool, typer.Option("--solution", help="Show an answer that is right.")] = False,
) -> None:
    """Learn what happens in a step: eight short lessons on the real library, each with an exercise.

    The exit status is 1 if an answer is wrong.
    """
    if lesson == "list":
        if check is not None or hint or solution:
            raise typer.BadParameter("it lists all lessons; give a number for --check, --hint or --solution.")
        for n, one in enumerate(LESSONS, 1):
            print(f"{n}  {one.title}")
        return
    if not lesson.isascii() or not lesson.isdecimal() or not 1 <= int(lesson[:4]) <= len(LESSONS):
        raise typer.BadParameter(f"{lesson!r:.40}: give 1 to {len(LESSONS)}, or list.", param_hint="N|list")
    number = int(lesson)
    exercise = LESSONS[number - 1].exercise
    if hint:
        print_text(exercise.hint)
    if solution:
        print(exercise.solution, end="")
    if check is not None:
        fault = check_answer(exercise, check)
        print_text(f"{check}: {fault}" if fault else f"{check}: right")
        raise typer.Exit(1 if fault else 0)
    if not hint and not solution:
        print(as_text(number, terminal_width()), end="")
