"""Batches of a server: the lines of a file, answered beside the requests of clients, and after them.

One process of those that share a store answers batches, one after the other. Each result is in a file before the next
is counted, so a batch goes on where it was when its process ends.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from traceback import print_exception
from typing import IO, Any

from foreword.engine import RequestOptions
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.request_group import RequestGroup
from foreword.errors import ConfigError, EngineError
from foreword.openai.batch import Answer, Lines, failure, response
from foreword.openai.batch_file import BatchLine, Record, Results, batch_lines
from foreword.openai.errors import named
from foreword.server.admission import Place
from foreword.server.context import Context
from foreword.server.errors import HttpError, openai_error
from foreword.server.file_routes import BATCH_OUTPUT, add_file
from foreword.server.generation import answer_bytes, check_completions, check_prompts, prompt_bytes
from foreword.server.store import Row, Store

if sys.platform != "win32":
    import fcntl

BATCH = "batch"
WAITING, RUNNING, CANCELLING = "validating", "in_progress", "cancelling"
UNFINISHED = (WAITING, RUNNING, CANCELLING)
PRIORITY = 2**31 - 1
"""Of the requests of batches: the last one."""
MOST_LINES = 50_000
MOST_ERRORS = 20  # of a file that a batch tells
PAUSE = 1.0  # seconds between looks for new batches, of other processes or cancelled there


class Batches:
    """Answers the batches of a store until it is cancelled. wake: set when there is a new one."""

    def __init__(self, context: Context) -> None:
        self._context, self._store = context, context.store
        self._lines = Lines(context.engine.engine, context.tokenizer, context.media, context.names)
        # Half of the rows are left to requests that clients wait for.
        self._share = max(context.engine.engine.states.max_num_reqs // 2, 1)

    async def run(self) -> None:
        """Run until it is cancelled."""
        with ExitStack() as stack:
            while not self._is_first(stack):
                await asyncio.sleep(PAUSE)
            is_told = False
            while True:
                try:
                    is_idle, is_told = not await self._next(), False
                except sqlite3.Error as error:  # a full disk, or another program's lock: the batch goes on afterwards
                    if not is_told:
                        print(f"batches wait: the database in data_directory: {error}", file=sys.stderr, flush=True)
                    is_idle = is_told = True
                if is_idle:
                    await asyncio.sleep(PAUSE)

    async def _next(self) -> bool:
        """Answer the oldest batch, and return whether there was one."""
        found = await asyncio.to_thread(self._store.first, BATCH, UNFINISHED)
        if found is None:
            return False
        owner, batch = found
        try:
            await self._answer(owner, batch)
        except sqlite3.Error:
            raise
        except Exception as error:  # of the disk, for one: the next batch may do better
            print_exception(error)
            message = error if isinstance(error, HttpError | ConfigError | OSError) else type(error).__name__
            await self._end(batch, "failed", errors=_errors([(None, "server_error", str(message))]))
        return True

    def _is_first(self, stack: ExitStack) -> bool:
        """Become the one process that answers batches, if none is."""
        if sys.platform == "win32":
            return True
        with ExitStack() as own:
            file: IO[bytes] = own.enter_context(_lock_file(self._store).open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
            stack.enter_context(own.pop_all())
        return True

    async def _answer(self, owner: str, batch: Row) -> None:
        """Answer the lines that are left of a batch."""
        batch_id, source = batch["id"], self._store.path("files", batch["input_file_id"])
        errors, total = await asyncio.to_thread(_checked, source, batch["endpoint"])
        if errors:
            await self._end(batch, "failed", errors=_errors(errors))
            return
        counts = {"total": total, "completed": 0, "failed": 0}
        begun = {"request_counts": counts, "in_progress_at": batch.get("in_progress_at") or int(time.time())}
        await self._change(batch_id, {**begun, "status": RUNNING}, RUNNING, (WAITING, RUNNING))
        path = self._store.path("batches", batch_id)
        with Results(str(path)) as results, source.open("rb") as file:
            lines = (line for line in batch_lines(file) if line.key not in results.done)
            counts["completed"], counts["failed"] = len(results.done) - results.num_errors, results.num_errors
            status = await self._run_lines(owner, batch, lines, results, counts)
        state = CANCELLING if status == "cancelled" else RUNNING
        await self._change(batch_id, {"status": "finalizing", "finalizing_at": int(time.time())}, state, UNFINISHED)
        made, lost = await asyncio.to_thread(self._outputs, owner, batch_id, path)
        if lost:
            status, made["errors"] = "failed", _errors(lost)
        await self._end(batch, status, request_counts=counts, **made)

    async def _run_lines(
        self, owner: str, batch: Row, lines: Iterator[BatchLine], results: Results, counts: dict[str, int]
    ) -> str:
        """Answer lines, some at a time, until there are no more, or it is cancelled or too late; return the status."""
        running: set[asyncio.Task[Record]] = set()
        told, state = time.monotonic(), None
        try:
            while True:
                while len(running) < self._share and (line := next(lines, None)) is not None:
                    running.add(asyncio.create_task(self._line(owner, batch["id"], line)))
                if not running:
                    return "completed"
                done, running = await asyncio.wait(running, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    record = task.result()
                    results.write(record)
                    is_error = record["response"] is None or record["response"]["status_code"] != 200
                    counts["failed" if is_error else "completed"] += 1
                if time.monotonic() - told > PAUSE:
                    told = time.monotonic()
                    with suppress(sqlite3.Error):  # it is tried again, and lines need no database
                        state = await asyncio.to_thread(self._store.state, batch["id"])
                        await self._change(batch["id"], {"request_counts": counts}, RUNNING, (RUNNING,))
                    if state == CANCELLING or time.time() > batch["expires_at"]:
                        return "cancelled" if state == CANCELLING else "expired"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _line(self, owner: str, batch_id: str, line: BatchLine) -> Record:
        """Return the result of a line, which has the limits of a request."""
        engine, uses = self._context.engine, self._context.admission.keys
        try:
            answer: Answer = await asyncio.to_thread(self._lines.read, line, f"{batch_id}.{line.number}")
            with ExitStack() as stack:
                groups = await self._check(owner, answer)
                await self._enter(owner, groups, stack)
                for one, group in zip(answer.prompts, groups, strict=True):
                    with engine.run(group) as stream:
                        *_, output = [output async for output in stream]
                    answer.outputs[one.index] = CheckedRequest(group, one.reader, one.index).read(output)
                    uses.add_tokens(owner, output.usage.total_tokens)
                return await asyncio.to_thread(self._lines.result, answer)
        except HttpError as error:
            return line.record(response(error.status, openai_error(error)), None)
        except EngineError as error:
            if engine.is_closed:
                raise asyncio.CancelledError from None  # the line is done again by the next process
            return failure(line, error)
        except Exception as error:  # whatever a line causes, the others are answered
            return failure(line, error)

    async def _check(self, owner: str, answer: Answer) -> list[RequestGroup]:
        """Check the prompts of a line. HttpError for more of them, or more completions, than a request may have."""
        context = self._context
        check_prompts(context, "prompt", len(answer.prompts))
        check_completions(context, answer.request.params)
        options: RequestOptions = {**answer.options, "priority": PRIORITY, "owner": owner}
        options["share"] = context.admission.keys.share(owner)
        if context.config.cache_by_key:
            options["cache_salt"] = f"{owner} {options.get('cache_salt') or ''}"
        groups = []
        for one in answer.prompts:
            with named(one.at, one.origins):
                checked = context.engine.check(one.name, one.prompt, one.params, client=f"batch {owner}", **options)
                groups.append(await checked)
        return groups

    async def _enter(self, owner: str, groups: Sequence[RequestGroup], stack: ExitStack) -> None:
        """Wait until the key has tokens left and there is memory for the answer, and take what it may use until the
        stack is closed. HttpError if the answer may take more memory than allowed.
        """
        context, admission = self._context, self._context.admission
        params, longest = groups[0].params, context.engine.engine.states.max_model_len
        num_bytes = answer_bytes(context, params, len(groups)) + prompt_bytes(context, groups)
        admission.check_bytes(num_bytes)
        while not (admission.keys.has_tokens(owner) and admission.has_room(num_bytes)):
            await asyncio.sleep(PAUSE)
        place = Place(admission, 0)
        stack.callback(place.end)
        place.add_bytes(num_bytes)
        most = longest if params.max_tokens is None else min(params.max_tokens, longest)
        num_tokens = sum(len(group.prompt) + params.num_completions * most for group in groups)
        admission.keys.add_tokens(owner, num_tokens)
        stack.callback(admission.keys.add_tokens, owner, -num_tokens)

    def _outputs(
        self, owner: str, batch_id: str, path: Path
    ) -> tuple[dict[str, Any], list[tuple[int | None, str, str]]]:
        """Keep the results and the errors of a batch as files. Return their ids, and what is lost, as errors."""
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
                lost.append((None, error.code or "", f"the {name} file found no room, and is lost: {error}"))
        return made, lost

    async def _change(self, batch_id: str, changes: dict[str, Any], state: str, instead_of: tuple[str, ...]) -> None:
        await asyncio.to_thread(self._store.change, batch_id, changes, state=state, instead_of=instead_of)

    async def _end(self, batch: Row, status: str, **changes: Any) -> None:
        """End a batch. Its results are in files then, or lost."""
        ended = {**changes, "status": status, f"{status}_at": int(time.time())}
        await self._change(batch["id"], ended, status, UNFINISHED)
        with suppress(OSError):
            self._store.path("batches", batch["id"]).unlink(missing_ok=True)


def _lock_file(store: Store) -> Path:
    assert store.directory is not None
    return store.directory / "batches.lock"


def _checked(source: Path, endpoint: str) -> tuple[list[tuple[int | None, str, str]], int]:
    """Return what is wrong with the lines of a file, as (line, code, message), and their number."""
    errors: list[tuple[int | None, str, str]] = []
    total = 0
    try:
        with source.open("rb") as file:
            for line in batch_lines(file):
                total += 1
                if line.error is not None:
                    errors.append((line.number, line.error.code, str(line.error)))
                elif line.url != endpoint:
                    reason = f"line {line.number}: url = {line.url!r}: the batch has endpoint {endpoint!r}"
                    errors.append((line.number, "mismatched_endpoint", reason))
                if len(errors) >= MOST_ERRORS:
                    break
    except OSError:
        return [(None, "file_not_found", "the input file was deleted, or cannot be read")], 0
    if not total:
        errors.append((None, "empty_file", "the input file has no lines"))
    if total > MOST_LINES:
        errors.append((None, "too_many_lines", f"the input file has {total} lines, more than {MOST_LINES}"))
    return errors, total


def _errors(found: list[tuple[int | None, str, str]]) -> dict[str, Any]:
    data = [{"line": line, "code": code, "message": message, "param": None} for line, code, message in found]
    return {"object": "list", "data": data}
