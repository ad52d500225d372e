"""Read OpenAI's batch files of requests, and write files of results, which a later run continues."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from foreword.errors import ConfigError, ForewordError, reason_of
from foreword.jsonfile import parse_object

if sys.platform != "win32":
    import fcntl

Record = dict[str, Any]
"""A line of the output: id, custom_id, response, error."""

URLS = ("/v1/chat/completions", "/v1/completions")
FIELDS = ("custom_id", "method", "url", "body")
SYNC_SECONDS = 5.0
_BEGINNING = b'{"id": "batch_req_'


class LineError(ForewordError, ValueError):
    """A line is not a request. code: the error code for programs. custom_id: that of the line, if it is usable."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        self.code, self.custom_id = code, custom_id
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input, numbered from 1: a request, or the reason why it is not a request."""

    number: int
    custom_id: str | None
    url: str = ""
    body: object = None
    error: LineError | None = None

    @property
    def key(self) -> str:
        """Return the key by which a later run finds the result: the custom_id, or the number of a line that is not a
        request.
        """
        return f"line {self.number}" if self.error is not None else f"id {self.custom_id}"

    def record(self, response: Record | None, error: Record | None) -> Record:
        return {"id": f"batch_req_{self.number}", "custom_id": self.custom_id, "response": response, "error": error}


def batch_lines(file: Iterable[bytes]) -> Iterator[BatchLine]:
    """Yield the lines of a batch file, and skip empty ones. A custom_id must not appear twice."""
    seen: set[str] = set()
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            line = read_line(number, text)
            if line.custom_id in seen:
                message = (
                    f"line {number}: custom_id {line.custom_id!r:.80} is that of an earlier line. Give each its own"
                )
                raise LineError("duplicate_custom_id", message, line.custom_id)
        except LineError as error:
            yield BatchLine(number, error.custom_id, error=error)
            continue
        seen.add(str(line.custom_id))
        yield line


def read_line(number: int, text: bytes) -> BatchLine:
    """Return the request of a line, without parsing its body. Raise LineError if the line is not a request."""
    try:
        given = parse_object(text, f"line {number}", ConfigError)
    except ConfigError as error:
        raise LineError("invalid_json", str(error)) from None
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = f"line {number}: custom_id = {custom_id!r:.80}: expected a string. Give each line its own"
        raise LineError("invalid_custom_id", message)
    for name, value, expected in (
        *((name, given[name], None) for name in given.keys() - set(FIELDS)),
        ("method", given.get("method"), ("POST",)),
        ("url", given.get("url"), URLS),
    ):
        if expected is None or value not in expected:
            fix = "unknown field. Leave it out" if expected is None else f"must be {' or '.join(expected)}"
            raise LineError("invalid_request", f"line {number}: {name} = {value!r:.80}: {fix}", custom_id)
    return BatchLine(number, custom_id, str(given["url"]), given.get("body"))


class Results:
    """The output of a batch: a file to which each result is appended as a whole line, or standard output for "-".

    An existing file is continued: `done` has the keys of its lines, and an incomplete last line is removed.
    retry_errors: errors in the file are removed, too, so that their lines are answered again. The file is locked
    against a second writer. Raise ConfigError if the file cannot be written or has other lines.
    """

    def __init__(self, name: str, *, retry_errors: bool = False) -> None:
        self.done: set[str] = set()
        self.num_errors = 0
        self._synced, self._is_regular = time.monotonic(), False
        self._closed_last = ExitStack()
        self._file: IO[bytes] = sys.stdout.buffer
        path = Path(name)
        if name != "-":
            try:
                self._file = self._closed_last.enter_context(path.open("ab"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be written ({reason_of(error)})") from None
            self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        try:
            if self._is_regular:
                self._lock(path)
                if retry_errors:
                    self._remove_errors(path)
                self._continue(path)
            elif retry_errors:
                raise ConfigError(f"--retry-errors: {name} has no earlier results. Give a file as OUT")
        except BaseException:
            self._closed_last.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_regular:
            os.fsync(self._file.fileno())
        self._closed_last.close()

    def write(self, record: Record) -> None:
        """Append a result. It survives the end of this process; every few seconds, results are also flushed to the
        disk.
        """
        self.num_errors += _is_error(record)
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._is_regular and time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _lock(self, path: Path) -> None:
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path}: another process writes this file. Wait for it, or give another") from None
            except OSError:  # the file system has no locks
                pass

    def _continue(self, path: Path) -> None:
        """Read what an earlier run wrote."""
        end = 0
        for text, record in _whole_lines(path):
            self.done.add(
                f"id {record['custom_id']}" if record["response"] else f"line {record['id'].rpartition('_')[2]}"
            )
            self.num_errors += _is_error(record)
            end += len(text)
        self._file.truncate(end)

    def _remove_errors(self, path: Path) -> None:
        """Replace the file atomically by one without errors. The old one stays locked for writers that opened it."""
        target = path.resolve()
        self._file = self._closed_last.enter_context(
            tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False)  # noqa: SIM115
        )
        new = Path(self._file.name)
        try:
            self._lock(new)
            self._file.writelines(text for text, record in _whole_lines(path) if not _is_error(record))
            self._file.flush()
            os.fsync(self._file.fileno())
            shutil.copymode(target, new)
            new.replace(target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def _is_error(record: Record) -> bool:
    return record["response"] is None or record["response"]["status_code"] != 200


def _whole_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Yield the lines that an earlier run wrote, with their results, except an incomplete last line."""
    with path.open("rb") as written:
        for number, text in enumerate(written, 1):
            beginning = text.rstrip(b"\0")[: len(_BEGINNING)]
            if not text.endswith(b"\n") and _BEGINNING.startswith(beginning):
                return
            yield text, _result(text, f"{path}: line {number}")


def _result(text: bytes, source: str) -> Record:
    """Parse a line that `Results.write` wrote. Raise ConfigError for any other line, so that other files are never
    changed.
    """
    record = parse_object(text, source, ConfigError)
    if (
        list(record) != ["id", "custom_id", "response", "error"]
        or not isinstance(record["id"], str)
        or (record["response"] is not None and not isinstance(record["response"], dict))
        or (record["response"] is not None and "status_code" not in record["response"])
    ):
        raise ConfigError(f"{source}: is not a result of a batch. Give another output file")
    return record
