"""`foreword batch`: answer a file of requests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import IO, Annotated, Any
from uuid import uuid4

import typer

from foreword import LLM, RequestOutput, SamplingParams
from foreword.batch import InputBatch
from foreword.cli.batch_file import BatchLine, Record, Results, batch_lines
from foreword.cli.options import ENGINE, EngineOptions, grouped
from foreword.cli.terminal import note
from foreword.engine import EngineMetrics, EngineObserver, RequestOptions
from foreword.engine.chat import ChatReader, make_chat
from foreword.errors import ConfigError, ForewordError, RequestError
from foreword.openai import (
    ChatRequest,
    CompletionRequest,
    chat_completion,
    error_body,
    parse_chat,
    parse_completion,
    text_completion,
)
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan


@grouped(engine=ENGINE)
def batch(
    requests: Annotated[str, typer.Argument(metavar="IN", help="A file of requests; -: standard input.")],
    results: Annotated[str, typer.Argument(metavar="OUT", help="The file of results; -: standard output.")],
    served: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", metavar="NAME", help="A model of requests to answer too. Repeatable."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=2**16, metavar="N", help="Requests computed at the same time.")
    ] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Write the results in the order of the requests.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Remove the errors of an earlier run from OUT; do their lines again.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of IN is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body"};
    each line of OUT has the custom_id and a response, or an error. After an interruption the same command continues.

    Exit status: 0; 1 if OUT has errors; 2 if the files or the model cannot be used; 130 after Ctrl-C.
    """
    settings = engine.settings | ({} if max_num_seqs is None else {"max_num_seqs": max_num_seqs})
    with _input(requests, results) as (file, size), Results(results, retry_errors=retry_errors) as out:
        num_done = len(out.done)
        llm = LLM(engine.model, **settings)
        metrics = EngineMetrics()
        llm.engine.observers.add(metrics)
        answers = Batch(llm, [engine.model, *(served or [])], ordered=ordered)
        started, shows = time.perf_counter(), sys.stderr.isatty() and not quiet
        pending = (line for line in batch_lines(file) if line.key not in out.done)
        try:
            with _progress(llm, metrics, size() if shows else None, num_done, is_shown=shows) as advance:
                for record in answers.run(pending):
                    out.write(record)
                    advance()
        except KeyboardInterrupt:
            note("the same command continues where this one ended")
            raise
        if shows or (out.num_errors and not quiet):
            seconds = time.perf_counter() - started
            note(
                f"{answers.num_lines} lines in {seconds:.1f} s",
                *([f"{num_done} done before"] if num_done else []),
                *([f"errors: {out.num_errors}"] if out.num_errors else []),
                f"{metrics.num_prompt_tokens} prompt tokens ({metrics.num_cached_tokens} reused)",
                f"{metrics.num_sampled_tokens} output tokens, {metrics.num_sampled_tokens / seconds:.1f}/s",
            )
    if out.num_errors:
        raise typer.Exit(1)


@dataclass(slots=True, eq=False)
class _Job:
    """A line in the engine, and its outputs, one per prompt. reader: of a conversation's output."""

    line: BatchLine
    request: ChatRequest | CompletionRequest
    model: str
    reader: ChatReader | None = None
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class Batch:
    """Answers lines, with a bounded number of them read and not yet answered.

    names: of models that are this one; the first stands for a request without. A request may name an adapter instead.
    ordered: results in the input's order.
    """

    def __init__(self, llm: LLM, names: list[str], *, ordered: bool = False) -> None:
        self._llm, self._names, self._ordered = llm, names, ordered
        self._limit = 2 * llm.engine.config.scheduler.max_num_seqs
        self._jobs: dict[str, _Job] = {}  # by the engine's request id
        self._open: dict[int, Record | None] = {}  # line number → its result, of lines that were read and not reported
        self.num_lines = 0

    def run(self, lines: Iterator[BatchLine]) -> Iterator[Record]:
        """The results, each as soon as it is known. An error of the engine itself is raised."""
        exhausted = False
        while not exhausted or self._jobs:
            while not exhausted and len(self._open) < self._limit:
                line = next(lines, None)
                exhausted = line is None
                if line is not None:
                    self.num_lines += 1
                    self._open[line.number] = None
                    if (refusal := self._start(line)) is not None:
                        yield from self._finish(line, refusal)
            for output in self._llm.engine.step() if self._jobs else ():
                job = self._jobs.pop(output.request_id)
                job.outputs[output.request_id] = output
                if None not in job.outputs.values():
                    yield from self._finish(job.line, self._result(job))

    def _start(self, line: BatchLine) -> Record | None:
        """Add the line to the engine; the result if it cannot be answered."""
        if line.error is not None:
            return line.record(None, {"code": line.error.code, "message": str(line.error)})
        engine = self._llm.engine
        try:
            job, prompts, params = self._parse(line)
            options = RequestOptions(**job.request.options, lora=None if job.model in self._names else job.model)
            groups = [engine.check(f"{line.number}.{i}", prompt, params, **options) for i, prompt in enumerate(prompts)]
        except ForewordError as error:
            return line.record(_response(*error_body(error)), None)
        try:
            for group in groups:
                engine.add(group)
        except RequestError as error:  # its adapter cannot be read again
            for group in groups:
                engine.abort(group.request_id)
            return line.record(_response(*error_body(error)), None)
        for group in groups:
            job.outputs[group.request_id] = None
            self._jobs[group.request_id] = job
        return None

    def _parse(self, line: BatchLine) -> tuple[_Job, Sequence[str | list[int]], SamplingParams]:
        """The line's request, and the prompts and parameters for the engine."""
        request = parse_chat(line.body) if line.url.endswith("/chat/completions") else parse_completion(line.body)
        model = request.model or self._names[0]
        if model not in (known := [*self._names, *self._llm.loras]):
            reason = f"this batch is answered by {' or '.join(map(repr, known))}"
            raise RequestError(None, "model", model, reason, "Use --model, or --served-model-name for another name.")
        if request.stream:
            raise RequestError(None, "stream", True, "a batch has no streams", "Leave it out.")
        if isinstance(request, CompletionRequest):
            return _Job(line, request, model), request.prompts, request.params
        limit = self._llm.engine.states.max_model_len
        chat = make_chat(self._llm.tokenizer, request.messages, request.params, limit, request.chat)
        return _Job(line, request, model, chat.reader()), [chat.token_ids], chat.params

    def _result(self, job: _Job) -> Record:
        outputs = [output for output in job.outputs.values() if output is not None]
        for output in outputs:
            if output.error is not None:
                return job.line.record(_response(*error_body(output.error)), None)
        tokens = self._llm.tokenizer
        named: dict[str, Any] = {"response_id": uuid4().hex, "created": int(time.time()), "model": job.model}
        if isinstance(job.request, ChatRequest):
            output = outputs[0] if job.reader is None else job.reader.read(outputs[0])
            body = chat_completion(job.request, output, tokens, **named)
        else:
            body = text_completion(job.request, outputs, tokens, **named)
        return job.line.record(_response(200, body), None)

    def _finish(self, line: BatchLine, record: Record) -> list[Record]:
        """The results that can be reported, now that this one is known."""
        self._open[line.number] = record
        ready = takewhile(lambda n: self._open[n] is not None, list(self._open)) if self._ordered else [line.number]
        return [found for number in ready if (found := self._open.pop(number)) is not None]


def _response(status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": uuid4().hex, "body": body}


@contextmanager
def _input(name: str, results: str) -> Iterator[tuple[Iterable[bytes], Callable[[], int | None]]]:
    """The lines of the input, and a function that counts them. ConfigError if it cannot be read or is the output."""
    if name == "-":
        yield sys.stdin.buffer, lambda: None
        return
    try:
        file: IO[bytes] = open(name, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r:.200}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    with file:
        if os.path.exists(results) and os.path.samefile(name, results):
            raise ConfigError(f"{name}: is the input and the output. Give another output file")
        yield file, lambda: _count_lines(name)


def _count_lines(name: str) -> int | None:
    """The lines of a file that are not empty; None if it can be read only once, as a pipe."""
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
    """Yields a function to call after each result; a bar on standard error. total: None: not known."""
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
