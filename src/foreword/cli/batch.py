"""`foreword batch`: answer a file of requests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Annotated

import typer

from foreword import LLM
from foreword.batch import InputBatch
from foreword.cli.options import ModelOptions, check_used, engine_options, grouped
from foreword.cli.terminal import note
from foreword.engine import EngineMetrics, EngineObserver
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError, reason_of
from foreword.installation import install
from foreword.openai.batch import Batch
from foreword.openai.batch_file import BatchLine, Results, batch_lines
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan


@grouped(engine=engine_options())
def batch(
    context: typer.Context,
    requests: Annotated[str, typer.Argument(metavar="IN", help="A file of requests; -: standard input.")],
    results: Annotated[str, typer.Argument(metavar="OUT", help="The file of results; -: standard output.")],
    served_model_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further model name that requests may use. Repeatable.")
    ] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Write the results in the order of the requests.")] = False,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Answer with replicas on Ray, which is started on this machine unless --ray-address is given."
        ),
    ] = False,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A running Ray cluster; auto: that of this machine.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Replicas of the model on Ray.")] = 2,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Remove the errors of an earlier run from OUT, and answer their lines again."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar and no summary.")] = False,
    *,
    engine: ModelOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of IN is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body"};
    each line of OUT has the custom_id and a response, or an error. After an interruption the same command continues.

    Exit status: 0; 1 if OUT has errors; 2 if the files or the model cannot be used; 130 after Ctrl-C.
    """
    if not on_ray:
        check_used(context, ("ray_address", "replicas"), "without --ray")
    settings, names = engine.settings, [engine.model, *(served_model_name or [])]
    with _input(requests, results) as (file, size), Results(results, retry_errors=retry_errors) as out:
        pending = (line for line in batch_lines(file) if line.key not in out.done)
        try:
            if on_ray:
                _answer_on_ray(pending, out, names, replicas, ray_address, settings, ordered=ordered, quiet=quiet)
            else:
                _answer(pending, out, names, settings, size, ordered=ordered, quiet=quiet)
        except KeyboardInterrupt:
            note("the same command continues where this one ended")
            raise
    if out.num_errors:
        raise typer.Exit(1)


def _answer(
    pending: Iterator[BatchLine],
    out: Results,
    names: list[str],
    settings: LLMOptions,
    size: Callable[[], int | None],
    *,
    ordered: bool,
    quiet: bool,
) -> None:
    """Answer the lines with an engine in this process."""
    num_done = len(out.done)
    llm = LLM(names[0], **settings)
    metrics = EngineMetrics()
    llm.engine.observers.add(metrics)
    answers = Batch(llm, names, ordered=ordered)
    started, shows = time.perf_counter(), sys.stderr.isatty() and not quiet
    with _progress(llm, metrics, size() if shows else None, num_done, is_shown=shows) as advance:
        for record in answers.run(pending):
            out.write(record)
            advance()
    if shows or (out.num_errors and not quiet):
        seconds = time.perf_counter() - started
        note(
            f"{answers.num_lines} lines in {seconds:.1f} s",
            *([f"{num_done} done before"] if num_done else []),
            *([f"errors: {out.num_errors}"] if out.num_errors else []),
            f"{metrics.num_prompt_tokens} prompt tokens ({metrics.num_cached_tokens} reused)",
            f"{metrics.num_sampled_tokens} output tokens, {metrics.num_sampled_tokens / seconds:.1f}/s",
        )


def _answer_on_ray(
    pending: Iterator[BatchLine],
    out: Results,
    names: list[str],
    replicas: int,
    address: str | None,
    settings: LLMOptions,
    *,
    ordered: bool,
    quiet: bool,
) -> None:
    """Answer the lines with replicas of the engine on Ray."""
    try:
        from foreword.ray.batch import RayBatch, connected
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ray needs {error.name}. {install('ray')}") from None
    num_done, num_lines, started = len(out.done), 0, time.perf_counter()
    with connected(address):
        for record in RayBatch(names, replicas, settings, ordered=ordered).run(pending):
            out.write(record)
            num_lines += 1
    if not quiet:
        note(
            f"{num_lines} lines in {time.perf_counter() - started:.1f} s by {replicas} replicas",
            *([f"{num_done} done before"] if num_done else []),
            *([f"errors: {out.num_errors}"] if out.num_errors else []),
        )


@contextmanager
def _input(name: str, results: str) -> Iterator[tuple[Iterable[bytes], Callable[[], int | None]]]:
    """Return the lines of the input, and a function that counts them.

    Raise ConfigError if it cannot be read or is the output.
    """
    if name == "-":
        yield sys.stdin.buffer, lambda: None
        return
    try:
        file: IO[bytes] = open(name, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r:.200}: cannot be read ({reason_of(error)})") from None
    with file:
        if os.path.exists(results) and os.path.samefile(name, results):
            raise ConfigError(f"{name}: is the input and the output. Give another output file")
        yield file, lambda: _count_lines(name)


def _count_lines(name: str) -> int | None:
    """Return the lines of a file that are not empty; None if it can be read only once, as a pipe."""
    if not os.path.isfile(name):
        return None
    with open(name, "rb") as file:
        return sum(bool(line.strip()) for line in file)


class _OnStep(EngineObserver):
    """Calls a function after each step."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self._function()


@contextmanager
def _progress(
    llm: LLM, metrics: EngineMetrics, total: int | None, done: int, *, is_shown: bool
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each result, which moves a bar on standard error. ``total`` is None if it is not
    known.
    """
    if not is_shown:
        yield lambda: None
        return
    from rich import progress  # takes 0.1 s to import, which only a terminal needs
    from rich.console import Console

    columns = (
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task("", total=total, completed=done, speed="")
        started, states = time.perf_counter(), llm.engine.states
        shown = started

        def show(num_results: int) -> None:
            nonlocal shown
            shown = time.perf_counter()
            unfinished = int((states.num_tokens - states.prompt_len)[states.live].sum())
            speed = (metrics.num_sampled_tokens + unfinished) / (shown - started)
            bar.update(task, advance=num_results, speed=f"{speed:.0f} tokens/s")

        def show_now_and_then() -> None:
            if time.perf_counter() > shown + 0.25:
                show(0)

        llm.engine.observers.add(_OnStep(show_now_and_then))
        yield lambda: show(1)
