"""Batches of a server: the lines of a file, which are answered beside the requests of clients, with lower priority.

One process of those that share a store answers batches: those of one owner one after the other, those of different
owners at the same time, so that none waits for the tokens of another owner's key. Each result is in a file before the
next one is counted, so that a batch continues where it was after its process ended.

    lines, those of one model together ─▶ one at a time: tokens of the key ─▶ model ─▶ checks, memory ─▶ engine
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import print_exception
from typing import IO, Any, NamedTuple

from foreword.engine import RequestOptions
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.request_group import RequestGroup
from foreword.errors import ConfigError, EngineError
from foreword.openai.batch import Answer, Lines, failure, response
from foreword.openai.batch_file import BatchLine, Record, Results, batch_lines, read_line
from foreword.openai.errors import named
from foreword.server.admission import Place
from foreword.server.context import Context
from foreword.server.errors import HttpError, openai_error
from foreword.server.failures import DISK_FULL, FULL, MODEL_FAILED, MODEL_LOADING, STORE_FAILED
from foreword.server.file_routes import BATCH_OUTPUT, add_file
from foreword.server.generation import answer_bytes, check_completions, check_prompts, prompt_bytes
from foreword.server.model_turns import ModelTurns
from foreword.server.models import ModelEntry, Models
from foreword.server.store import BATCHES_LOCK, Row
from foreword.server.store import FULL as DISK_IS_FULL

if sys.platform != "win32":
    import fcntl

BATCH = "batch"
WAITING, RUNNING, CANCELLING = "validating", "in_progress", "cancelling"
UNFINISHED = (WAITING, RUNNING, CANCELLING)
PRIORITY = 2**31 - 1
"""The priority of the requests of batches: the lowest."""
MOST_LINES = 50_000
MOST_ERRORS = 20  # errors of a file that a batch reports
MOST_AT_ONCE = 512  # lines of a batch in memory
PAUSE = 1.0  # seconds between checks for batches that other processes made or cancelled


class _LinePlace(NamedTuple):
    """The place of a line in its file. model: the name of the model in the line. offset: in bytes."""

    model: str | None
    key: str
    number: int
    offset: int


class _ReadyLine(NamedTuple):
    """A line whose prompts may run. lines: the object that reads and writes lines of its model."""

    lines: Lines
    answer: Answer
    groups: list[RequestGroup]


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that is being answered. turn: the lock in which one line at a time waits for its limits. failed: models
    that could not be loaded, with the error that all their lines have.
    """

    owner: str
    batch: Row
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed: dict[ModelEntry, HttpError] = field(default_factory=dict)


class Batches:
    """Answers the batches of a server's store until it is cancelled."""

    def __init__(self, models: Models) -> None:
        self._models, self._store, self._admission = models, models.shared.store, models.shared.admission
        self._turns = ModelTurns(models)

    async def run(self) -> None:
        """Run until it is cancelled."""
        running: dict[str, asyncio.Task[None]] = {}  # by owner
        with ExitStack() as stack:
            while not self._is_first(stack):
                await asyncio.sleep(PAUSE)
            is_reported = False
            try:
                while True:
                    try:
                        for owner, batch in await asyncio.to_thread(self._store.oldest, BATCH, UNFINISHED):
                            if owner not in running:
                                running[owner] = asyncio.create_task(self._answer_one(owner, batch))
                        if await self._wait(running):
                            is_reported = False
                    except (HttpError, OSError) as error:  # a full disk, or a lock of another program
                        if not is_reported:
                            reason = error if isinstance(error, HttpError) else f"data_directory: {error}"
                            print(f"foreword: batches wait: {reason}", file=sys.stderr, flush=True)
                        is_reported = True
                        await asyncio.sleep(PAUSE)
            finally:
                for task in running.values():
                    task.cancel()
                await asyncio.gather(*running.values(), return_exceptions=True)

    @staticmethod
    async def _wait(running: dict[str, asyncio.Task[None]]) -> bool:
        """Wait briefly for the end of a batch, and return whether one has ended. Raise the store's HttpError, or the
        OSError of a full disk, if the batch is to continue later.
        """
        if not running:
            await asyncio.sleep(PAUSE)
            return False
        await asyncio.wait(running.values(), timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
        done = [running.pop(owner) for owner, task in list(running.items()) if task.done()]
        for error in await asyncio.gather(*done, return_exceptions=True):
            if error is not None:
                raise error
        return bool(done)

    async def _answer_one(self, owner: str, batch: Row) -> None:
        """Answer a batch, and end it. Raise the store's HttpError, or the OSError of a full disk, if it is to be tried
        again.
        """
        try:
            await self._answer(owner, batch)
        except Exception as error:  # for example an error of the disk: the next batch may succeed
            if _is_of_store(error):
                raise
            print_exception(error)
            message = error if isinstance(error, HttpError | ConfigError | OSError) else type(error).__name__
            await self._end(batch, "failed", errors=_errors([(None, "server_error", str(message))]))
        finally:
            self._turns.leave(owner)

    def _is_first(self, stack: ExitStack) -> bool:
        """Make this process the one that answers batches, if no other process is. Return whether it is."""
        if sys.platform == "win32":
            return True
        with ExitStack() as own:
            file: IO[bytes] = own.enter_context(self._store.lock_file(BATCHES_LOCK))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            stack.enter_context(own.pop_all())
        return True

    async def _answer(self, owner: str, batch: Row) -> None:
        """Answer the remaining lines of a batch."""
        batch_id, source = batch["id"], self._store.path("files", batch["input_file_id"])
        errors, places = await asyncio.to_thread(_checked, source, batch["endpoint"])
        if errors:
            await self._end(batch, "failed", errors=_errors(errors))
            return
        counts = {"total": len(places), "completed": 0, "failed": 0}
        begun = {"request_counts": counts, "in_progress_at": batch.get("in_progress_at") or int(time.time())}
        await self._change(batch_id, {**begun, "status": RUNNING}, RUNNING, (WAITING, RUNNING))
        if await asyncio.to_thread(self._store.state, batch_id) not in (RUNNING, CANCELLING):
            return  # it was cancelled while its file was checked
        path = self._store.path("batches", batch_id)
        with Results(str(path)) as results, source.open("rb") as file:
            left = self._in_order(place for place in places if place.key not in results.done)
            lines = (_line_at(file, place) for place in left)
            counts["completed"], counts["failed"] = len(results.done) - results.num_errors, results.num_errors
            status = await self._run_lines(_Run(owner, batch), lines, results, counts)
        state = CANCELLING if status == "cancelled" else RUNNING
        await self._change(batch_id, {"status": "finalizing", "finalizing_at": int(time.time())}, state, UNFINISHED)
        made, lost = await asyncio.to_thread(self._outputs, owner, batch_id, path)
        if lost:
            status, made["errors"] = "failed", _errors(lost)
        await self._end(batch, status, request_counts=counts, **made)

    def _in_order(self, places: Iterable[_LinePlace]) -> list[_LinePlace]:
        """Return lines with those of one model together, so that it is loaded once for them."""
        of_models: dict[ModelEntry | None, list[_LinePlace]] = {}
        for place in places:
            of_models.setdefault(self._entry(place.model), []).append(place)
        return [place for together in of_models.values() for place in together]

    def _entry(self, name: str | None) -> ModelEntry | None:
        """Return the model that answers lines with this name; None if there is none."""
        return self._models.entries[0] if name is None else self._models.owner(name)

    async def _run_lines(self, run: _Run, lines: Iterator[BatchLine], results: Results, counts: dict[str, int]) -> str:
        """Answer lines, some at a time, until none are left, or the batch is cancelled or has expired. Return its
        status.
        """
        running: set[asyncio.Task[Record]] = set()
        batch, asked = run.batch, time.monotonic()
        state: str | None = RUNNING
        try:
            while True:
                while len(running) < MOST_AT_ONCE and (line := next(lines, None)) is not None:
                    running.add(asyncio.create_task(self._line(run, line)))
                if not running:
                    return "completed"
                done, running = await asyncio.wait(running, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    record = task.result()
                    results.write(record)
                    is_error = record["response"] is None or record["response"]["status_code"] != 200
                    counts["failed" if is_error else "completed"] += 1
                if time.monotonic() - asked > PAUSE:
                    asked = time.monotonic()
                    with suppress(HttpError):  # it is tried again, and lines need no database
                        state = await asyncio.to_thread(self._store.state, batch["id"])
                        await self._change(batch["id"], {"request_counts": counts}, RUNNING, (RUNNING,))
                    if state != RUNNING or time.time() > batch["expires_at"]:  # not there: it was cancelled before
                        return "cancelled" if state != RUNNING else "expired"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _line(self, run: _Run, line: BatchLine) -> Record:
        """Return the result of a line, which has the limits of a request."""
        owner, uses, engine = run.owner, self._admission.keys, None
        name = f"{run.batch['id']}.{line.number}"
        async with AsyncExitStack() as stack:
            try:
                async with run.turn:
                    while not uses.has_tokens(owner):  # before its model is loaded for it, or kept loaded
                        await asyncio.sleep(PAUSE)
                    context = await self._model(run, line, name, stack)
                    engine = context.engine
                    ready = await self._ready(owner, line, name, context, stack)
                answer = ready.answer
                for one, group in zip(answer.prompts, ready.groups, strict=True):
                    with engine.run(group) as stream:
                        *_, output = [output async for output in stream]
                    answer.outputs[one.index] = CheckedRequest(group, one.reader, one.index).read(output)
                    uses.add_tokens(owner, output.usage.total_tokens)
                return await asyncio.to_thread(ready.lines.result, answer)
            except HttpError as error:
                return line.record(response(error.status, openai_error(error)), None)
            except EngineError as error:
                if engine is not None and engine.is_closed and len(self._models.entries) == 1:
                    raise asyncio.CancelledError from None  # the line is done again by the next process
                return failure(line, error)
            except Exception as error:  # any error of a line: the others are answered
                return failure(line, error)

    async def _model(self, run: _Run, line: BatchLine, name: str, stack: AsyncExitStack) -> Context:
        """Return the context of the model that a line names, which is loaded if necessary, with one of the places of
        lines in its engine. Both are the line's until the stack is closed. Raise HttpError if it cannot be loaded,
        which is tried once for all lines of the batch.
        """
        entry = self._models.find(_model_name(line))
        if entry in run.failed:
            raise run.failed[entry].with_traceback(None)
        try:
            await self._turns.take(run.owner, entry)
            context = await self._loaded(line, name, stack)
        except HttpError as error:
            if error.failure is MODEL_FAILED:
                run.failed[entry] = error
            self._turns.leave(run.owner)
            raise
        self._turns.begin(run.owner)
        await stack.enter_async_context(context.lines)
        return context

    async def _loaded(self, line: BatchLine, name: str, stack: AsyncExitStack) -> Context:
        """Return the context of a line's model, once it is loaded. Raise HttpError if it cannot be."""
        while True:
            try:
                return await stack.enter_async_context(self._models.using(_model_name(line), name, of_batch=True))
            except HttpError as error:
                if error.failure not in (FULL, MODEL_LOADING):
                    raise
                await asyncio.sleep(PAUSE)

    async def _ready(
        self, owner: str, line: BatchLine, name: str, context: Context, stack: AsyncExitStack
    ) -> _ReadyLine:
        """Check a line, wait until there is memory for its answer, and reserve its limits until the stack is closed.
        Raise HttpError if the answer may take more memory than allowed, or has more completions.
        """
        lines = Lines(context.engine.engine, context.tokenizer, context.media, context.names)
        answer = await asyncio.to_thread(lines.read, line, name)
        groups = await self._check(owner, answer, context)
        params, longest = groups[0].params, context.engine.engine.states.max_model_len
        num_bytes = answer_bytes(context, params, len(groups)) + prompt_bytes(context, groups)
        self._admission.check_bytes(num_bytes)
        while not self._admission.has_room(num_bytes):
            await asyncio.sleep(PAUSE)
        place = Place(self._admission, 0)
        stack.callback(place.end)
        place.add_bytes(num_bytes)
        most = longest if params.max_tokens is None else min(params.max_tokens, longest)
        num_tokens = sum(len(group.prompt) + params.num_completions * most for group in groups)
        self._admission.keys.add_tokens(owner, num_tokens)
        stack.callback(self._admission.keys.add_tokens, owner, -num_tokens)
        return _ReadyLine(lines, answer, groups)

    async def _check(self, owner: str, answer: Answer, context: Context) -> list[RequestGroup]:
        """Check the prompts of a line.

        Raise HttpError for more of them, or more completions, than a request may have.
        """
        check_prompts(context, "prompt", len(answer.prompts))
        check_completions(context, answer.request.params)
        options: RequestOptions = {**answer.options, "priority": PRIORITY, "owner": owner}
        options["share"] = self._admission.keys.share(owner)
        if context.config.cache_by_key:
            options["cache_salt"] = f"{owner} {options.get('cache_salt') or ''}"
        groups = []
        for one in answer.prompts:
            with named(one.at, one.origins):
                checked = context.engine.check(
                    one.name, one.prompt, one.params, prompt_text=one.text, client=f"batch {owner}", **options
                )
                groups.append(await checked)
        return groups

    def _outputs(
        self, owner: str, batch_id: str, path: Path
    ) -> tuple[dict[str, Any], list[tuple[int | None, str, str]]]:
        """Keep the results and the errors of a batch as files. Return their ids, and an error for each file that is
        lost.
        """
        parts: dict[str, list[bytes]] = {"output": [], "error": []}
        for text in path.read_bytes().splitlines(keepends=True):
            record = json.loads(text)
            is_error = record["response"] is None or record["response"]["status_code"] != 200
            parts["error" if is_error else "output"].append(text)
        made: dict[str, Any] = {}
        lost: list[tuple[int | None, str, str]] = []
        for name, texts in parts.items():
            made[f"{name}_file_id"] = None
            # The id follows from that of the batch, so that a file that is kept again replaces itself.
            file_id = f"file-{batch_id.removeprefix(f'{BATCH}-')}-{name}"
            try:
                if texts:
                    add_file(
                        self._store, owner, f"{batch_id}_{name}.jsonl", BATCH_OUTPUT, b"".join(texts), file_id=file_id
                    )
                    made[f"{name}_file_id"] = file_id
            except HttpError as error:
                if _is_of_store(error):
                    raise
                lost.append((None, error.code or "", f"the {name} file found no room, and is lost: {error}"))
        return made, lost

    async def _change(self, batch_id: str, changes: dict[str, Any], state: str, instead_of: tuple[str, ...]) -> None:
        await asyncio.to_thread(self._store.change, batch_id, changes, state=state, instead_of=instead_of)

    async def _end(self, batch: Row, status: str, **changes: Any) -> None:
        """End a batch. Afterwards its results are in files or lost."""
        ended = {**changes, "status": status, f"{status}_at": int(time.time())}
        await self._change(batch["id"], ended, status, UNFINISHED)
        with suppress(OSError):
            self._store.path("batches", batch["id"]).unlink(missing_ok=True)


def _is_of_store(error: Exception) -> bool:
    """Return whether a batch continues when the disk has space again, or when another program releases the database."""
    if isinstance(error, OSError):
        return error.errno in DISK_IS_FULL
    return isinstance(error, HttpError) and error.failure in (DISK_FULL, STORE_FAILED)


def _model_name(line: BatchLine) -> str | None:
    """Return the name of the model that a line gives. A value of another type is left to its parser."""
    name = line.body.get("model") if isinstance(line.body, dict) else None
    return name if isinstance(name, str) else None


def _line_at(file: IO[bytes], place: _LinePlace) -> BatchLine:
    file.seek(place.offset)
    return read_line(place.number, file.readline())


def _checked(source: Path, endpoint: str) -> tuple[list[tuple[int | None, str, str]], list[_LinePlace]]:
    """Return the errors in the lines of a file, as (line, code, message), and the places of the lines."""
    errors: list[tuple[int | None, str, str]] = []
    places: list[_LinePlace] = []
    offsets = [0]

    def texts(file: IO[bytes]) -> Iterator[bytes]:
        for text in file:
            offsets.append(offsets[-1] + len(text))
            yield text

    try:
        with source.open("rb") as file:
            for line in batch_lines(texts(file)):
                places.append(_LinePlace(_model_name(line), line.key, line.number, offsets[line.number - 1]))
                if line.error is not None:
                    errors.append((line.number, line.error.code, str(line.error)))
                elif line.url != endpoint:
                    reason = f"line {line.number}: url = {line.url!r}: the batch has endpoint {endpoint!r}"
                    errors.append((line.number, "mismatched_endpoint", reason))
                if len(errors) >= MOST_ERRORS or len(places) > MOST_LINES:
                    break
    except OSError:
        return [(None, "file_not_found", "the input file was deleted, or cannot be read")], []
    if not places:
        errors.append((None, "empty_file", "the input file has no lines"))
    if len(places) > MOST_LINES:
        errors.append((None, "too_many_lines", f"the input file has more than {MOST_LINES} lines"))
    return errors, places


def _errors(found: list[tuple[int | None, str, str]]) -> dict[str, Any]:
    data = [{"line": line, "code": code, "message": message, "param": None} for line, code, message in found]
    return {"object": "list", "data": data}
