"""The store of a server for its clients: files, batches and responses, each with its owner.

It is in a directory, with a SQLite database and the contents of files, so that it survives restarts and several
processes can share it. Without a directory it is in memory, and keeps only responses.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import IO, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from foreword.errors import ConfigError, reason_of
from foreword.ownership import check_regular, make_folder, open_for_writing, open_lock
from foreword.server.errors import HttpError
from foreword.server.failures import DISK_FULL, NOT_FOUND, STORAGE_FULL, STORE_FAILED

if sys.platform != "win32":
    import fcntl

P = ParamSpec("P")
T = TypeVar("T")
Row = dict[str, Any]
FULL = (errno.ENOSPC, errno.EDQUOT)
_TABLES = """
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL, kind TEXT NOT NULL, owner TEXT NOT NULL, created INTEGER NOT NULL, used REAL NOT NULL,
    state TEXT NOT NULL, size INTEGER NOT NULL, body TEXT NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS of_owner ON items (kind, owner, created);
CREATE INDEX IF NOT EXISTS of_state ON items (kind, state);
CREATE INDEX IF NOT EXISTS of_use ON items (kind, used);
"""
WAIT = 5.0  # seconds for another process that writes
BATCHES_LOCK = "batches.lock"  # held by the one process that answers batches
IN_MEMORY = 128 << 20  # bytes of a store without a directory


class Page(NamedTuple):
    """A part of a list, which begins after the item of this id if one is given."""

    limit: int = 20
    after: str | None = None
    newest_first: bool = True


def _with_http_errors(method: Callable[Concatenate[Store, P], T]) -> Callable[Concatenate[Store, P], T]:
    """Make a method of a store raise the errors of `Store.http_errors`."""

    @wraps(method)
    def guarded(store: Store, /, *args: P.args, **keywords: P.kwargs) -> T:
        with store.http_errors():
            return method(store, *args, **keywords)

    return guarded


class Store:
    """Items by kind and id. Only their owner sees them. It may be used in any thread.

    max_bytes: the limit of all items with the contents of files; without a directory it is at most `IN_MEMORY`. Raise
    ConfigError for a directory that cannot be used. Its methods raise HttpError 507 if the disk is full, and 503 if the
    directory cannot be used any more, or another program has locked it.
    """

    def __init__(self, directory: str | Path | None, max_bytes: int) -> None:
        self.directory = None if directory is None else Path(directory)
        self.max_bytes = max_bytes if directory is not None else min(max_bytes, IN_MEMORY)
        self._lock = self._read_lock = Lock()
        self._claim: IO[bytes] | None = None
        self._used: dict[tuple[str, str], float] = {}  # when items were read, by owner and id; the next change notes it
        try:
            if self.directory is not None:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                for name in ("files", "batches"):
                    make_folder(self.directory / name, 0o700)
            place = ":memory:" if self.directory is None else str(self.directory / "foreword.sqlite")
            if self.directory is not None:  # SQLite follows links
                for end in ("", "-wal", "-shm", "-journal"):
                    check_regular(Path(place + end))
            self._db = sqlite3.connect(place, timeout=WAIT, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
            self._read_db = self._db
            if self.directory is not None:  # readers of another connection wait for no writer
                self._read_lock = Lock()
                self._read_db = sqlite3.connect(place, timeout=WAIT, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"data_directory={str(directory)!r:.200}: cannot be used ({reason})") from None

    def claim(self, names: Iterable[str]) -> None:
        """Let no server of other models use the directory until this one is closed: it would answer their batches.
        Raise ConfigError if one does, or for a file of a lock that cannot be used.
        """
        if self.directory is None or sys.platform == "win32":
            return
        own = json.dumps(sorted(names)).encode()
        self.lock_file(BATCHES_LOCK).close()  # it fails now, not in the background
        self._claim = self.lock_file("models.lock")
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._claim.truncate(0)
                self._claim.write(own)
                self._claim.flush()
            except BlockingIOError:
                pass
            fcntl.flock(self._claim, fcntl.LOCK_SH)
            self._claim.seek(0)
            if (found := self._claim.read()) != own:
                self._claim.close()
                raise ConfigError(
                    f"data_directory={str(self.directory)!r:.200}: a server of other models uses it "
                    f"({found.decode(errors='replace'):.200}), which would answer the batches of this one. Give each "
                    "of them a directory of its own, or serve the models in one server"
                )

    def lock_file(self, name: str) -> IO[bytes]:
        """Open a file of the directory that is there for its lock.

        Raise ConfigError if it is a link, or cannot be opened.
        """
        assert self.directory is not None
        path = self.directory / name
        try:
            return os.fdopen(open_lock(path), "r+b")
        except OSError as error:
            raise ConfigError(
                f"data_directory={str(self.directory)!r:.200}: {path.name} must be a regular file that this user may "
                f"write ({reason_of(error)}). Delete {str(path)!r:.200}"
            ) from None

    @contextmanager
    def http_errors(self) -> Iterator[None]:
        """Raise an error of the directory or of the database in the block as the HttpError that clients get."""
        try:
            yield
        except OSError as error:
            raise _failed(reason_of(error), is_full=error.errno in FULL) from error
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise _failed(str(error), is_full=is_full) from error

    def close(self) -> None:
        """Close the store. Closing twice is harmless."""
        if self._claim is not None:
            self._claim.close()
        for db, lock in ((self._read_db, self._read_lock), (self._db, self._lock)):
            with lock:  # a thread may use it still
                db.close()

    @_with_http_errors
    def add(
        self, kind: str, owner: str, item_id: str, body: Mapping[str, Any], *, state: str = "", size: int = 0
    ) -> None:
        """Add an item, or replace it. size: the bytes that belong to it beside the body. Raise HttpError 400 if it has
        no room.
        """
        text, now = json.dumps(body), time.time()
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            (used,) = self._db.execute(
                "SELECT COALESCE(SUM(size), 0) FROM items WHERE id != ? OR owner != ?", (item_id, owner)
            ).fetchone()
            if used + len(text) + size > self.max_bytes:
                reason = f"the stored data would have more than {self.max_bytes} bytes (max_data_bytes). Delete some"
                raise HttpError(STORAGE_FULL, reason)
            self._note_uses()
            row = item_id, kind, owner, body.get("created_at", int(now)), now, state, len(text) + size, text
            self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    @_with_http_errors
    def make_room(self, kind: str, count: int, num_bytes: int) -> None:
        """Delete the least recently used items until at most this many are left, with at most this many bytes."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._note_uses()
            query = "SELECT rowid, size FROM items WHERE kind = ? ORDER BY used DESC"
            rows = self._db.execute(query, (kind,)).fetchall()
            total, dropped = 0, []
            for i, (row_id, size) in enumerate(rows):
                total += size
                if i >= count or total > num_bytes:
                    dropped.append((row_id,))
            self._db.executemany("DELETE FROM items WHERE rowid = ?", dropped)

    @_with_http_errors
    def get(self, kind: str, owner: str, item_id: str) -> Row:
        """Return an item. Raise HttpError 404 if its owner has none of this id."""
        with self._read_lock:
            query = "SELECT body FROM items WHERE id = ? AND kind = ? AND owner = ?"
            found = self._read_db.execute(query, (item_id, kind, owner)).fetchone()
            if found is None:
                raise HttpError(NOT_FOUND, f"{kind} {item_id!r:.80}: there is none", param="id")
            self._used[owner, item_id] = time.time()
        row: Row = json.loads(found[0])
        return row

    def _note_uses(self) -> None:
        """Write the times at which items were read since the last call, as a part of a change. Times of reads meanwhile
        may be lost.
        """
        used, self._used = self._used, {}
        rows = [(when, owner, item_id) for (owner, item_id), when in list(used.items())]
        self._db.executemany("UPDATE items SET used = ? WHERE owner = ? AND id = ?", rows)

    @_with_http_errors
    def delete(self, kind: str, owner: str, item_id: str) -> None:
        """Remove an item. Raise HttpError 404 if its owner has none of this id."""
        with self._lock:
            query = "DELETE FROM items WHERE id = ? AND kind = ? AND owner = ?"
            if not self._db.execute(query, (item_id, kind, owner)).rowcount:
                raise HttpError(NOT_FOUND, f"{kind} {item_id!r:.80}: there is none", param="id")

    @_with_http_errors
    def listed(
        self, kind: str, owner: str, page: Page, *, fields: Mapping[str, str] | None = None
    ) -> tuple[list[Row], bool]:
        """Return items in the order of their creation, and whether there are more. fields: fields of the bodies with
        the values that they must have. Raise HttpError 404 for an unknown id.
        """
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        query, values = "SELECT body FROM items WHERE kind = ? AND owner = ?", [kind, owner]
        for name, value in (fields or {}).items():
            query, values = f"{query} AND json_extract(body, ?) = ?", [*values, f"$.{name}", value]
        with self._read_lock:
            if page.after is not None:
                at = self._read_db.execute(
                    "SELECT rowid FROM items WHERE id = ? AND owner = ?", (page.after, owner)
                ).fetchone()
                if at is None:
                    raise HttpError(NOT_FOUND, f"after = {page.after!r:.80}: there is none", param="after")
                query, values = f"{query} AND rowid {beyond} ?", [*values, at[0]]
            query = f"{query} ORDER BY rowid {order} LIMIT ?"
            rows = self._read_db.execute(query, [*values, page.limit + 1]).fetchall()
        return [json.loads(text) for (text,) in rows[: page.limit]], len(rows) > page.limit

    @_with_http_errors
    def count(self, kind: str, owner: str, states: Sequence[str] = ()) -> int:
        """Return the number of an owner's items, in one of these states if some are given."""
        marks = f" AND state IN ({', '.join('?' * len(states))})" if states else ""
        with self._read_lock:
            query = f"SELECT COUNT(*) FROM items WHERE kind = ? AND owner = ?{marks}"
            (found,) = self._read_db.execute(query, [kind, owner, *states]).fetchone()
        return int(found)

    @_with_http_errors
    def oldest(self, kind: str, states: Sequence[str]) -> list[tuple[str, Row]]:
        """Return each owner with the body of the oldest of its items that are in one of these states."""
        query = (
            f"SELECT owner, body, MIN(rowid) FROM items WHERE kind = ? AND state IN ({', '.join('?' * len(states))})"
        )
        with self._read_lock:
            found = self._read_db.execute(f"{query} GROUP BY owner ORDER BY MIN(rowid)", [kind, *states]).fetchall()
        return [(owner, json.loads(text)) for owner, text, _ in found]

    @_with_http_errors
    def state(self, item_id: str) -> str | None:
        """Return the state of an item; None if there is none of this id."""
        with self._read_lock:
            found = self._read_db.execute("SELECT state FROM items WHERE id = ?", (item_id,)).fetchone()
        return None if found is None else str(found[0])

    @_with_http_errors
    def change(self, item_id: str, changes: Mapping[str, Any], *, state: str, instead_of: Sequence[str]) -> bool:
        """Change the body and the state of an item that is in one of these states; return whether it was."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            found = self._db.execute("SELECT state, body FROM items WHERE id = ?", (item_id,)).fetchone()
            if found is None or found[0] not in instead_of:
                return False
            text = json.dumps({**json.loads(found[1]), **changes})
            self._db.execute("UPDATE items SET state = ?, body = ? WHERE id = ?", (state, text, item_id))
        return True

    def path(self, folder: str, item_id: str) -> Path:
        """Return the path of the content of an item, in a store with a directory."""
        assert self.directory is not None
        return self.directory / folder / item_id

    @_with_http_errors
    def write(self, path: Path, data: bytes) -> None:
        """Write the content of an item completely or not at all."""
        part = path.with_name(f".{path.name}.part")
        try:
            with os.fdopen(open_for_writing(part), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    @_with_http_errors
    def remove(self, path: Path) -> None:
        """Remove the content of an item, if there is one."""
        path.unlink(missing_ok=True)


def _failed(reason: str, *, is_full: bool) -> HttpError:
    """Return the error of requests that need the directory."""
    if is_full:
        return HttpError(DISK_FULL, f"the disk of the server's data_directory is full ({reason}). Free some of it")
    return HttpError(STORE_FAILED, f"the server's data_directory cannot be used ({reason}). Try again later")


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}-{secrets.token_hex(16)}"
