"""The folder of packed weights. Files are found by their recipe, written completely or not at all, and kept within a
quota.

    KEY.weights   a packed file (`foreword.executors.packed.file`)
    KEY.checked   the identity that the packed file had when all its bytes were compared with its digest; the time of
                  its last change is that of the last use
    KEY.tmp       a packed file that is being written, by the process that has it locked

A process that finds no packed file writes it while it holds the lock; others wait for it, at most `_PATIENCE`
seconds, or longer for large ones.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from foreword.errors import reason_of
from foreword.executors.packed.file import PackedFile, PackedFileError, Part, read_recipe, write_parts
from foreword.hashes import sha256
from foreword.models.digests import Digests, is_young, write_private
from foreword.models.files import identity_of
from foreword.models.registry import cache_dir
from foreword.ownership import is_own, open_lock

if sys.platform != "win32":
    import fcntl

_PATIENCE = 300.0
_SLOW_DISK = 20e6  # bytes per second, for which others wait longer
_POLL = 0.05
_FREE_BYTES = 1 << 29  # left on the disk


class NotKeptError(Exception):
    """Packed weights that cannot be kept or used here, with the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A packed file. files: the digests of the files that it was computed from. last_used: seconds since 1970."""

    path: Path
    size: int
    last_used: float
    files: tuple[str, ...]


class PackedStore:
    """Packed files of at most ``quota`` bytes in total, in the folder "packed" of `cache_dir`, which is created if it
    is missing.

    The folder and its files belong to this user alone, because what is in them is computed with.
    """

    def __init__(self, quota: int = 0) -> None:
        self.folder, self.quota = cache_dir() / "packed", quota

    def find(self, recipe: Mapping[str, Any]) -> PackedFile | None:
        """Return the packed file of a recipe. Its bytes are compared with its digest unless that was done before.

        Return None if there is no such file. A damaged file is deleted, with a warning. Raise NotKeptError if the file
        may not be used.
        """
        path = self._path(recipe)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotKeptError(f"{path} cannot be read ({reason_of(error)})") from None
        try:
            status = os.fstat(descriptor)
            if not is_own(status) or not is_own(self.folder.stat()):
                raise NotKeptError(f"{path} or its folder belongs to another user, or others may write to it")
            file = PackedFile(descriptor)
            if file.recipe != recipe:
                raise PackedFileError("it follows from something else")
            self._check_once(path, file, identity_of(status))
        except PackedFileError as error:
            warnings.warn(f"{path} is damaged ({error}): the weights are packed again", stacklevel=2)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        except OSError as error:
            raise NotKeptError(f"{path} cannot be mapped ({reason_of(error)})") from None
        finally:
            os.close(descriptor)
        return file

    @contextlib.contextmanager
    def writing(self, recipe: Mapping[str, Any], size: int) -> Iterator[IO[bytes] | None]:
        """Hold the lock of a recipe's packed file, and yield a file to write it to; `keep` gives it its name.

        Yield None if another process wrote it meanwhile. size: the approximate number of bytes that will be written.
        Raise NotKeptError if the file cannot be written.
        """
        temporary = self._path(recipe).with_suffix(".tmp")
        try:
            self._make_folder()
            self._check_quota(size)
            self._make_space(size)
            with _locked(temporary, max(_PATIENCE, size / _SLOW_DISK)) as file:
                if self._path(recipe).exists():
                    temporary.unlink(missing_ok=True)
                    yield None
                    return
                try:
                    yield file
                finally:
                    if _is_named(file, temporary):  # after `keep` it has another name
                        temporary.unlink()
        except OSError as error:
            raise NotKeptError(f"{self.folder} cannot be written ({reason_of(error)})") from None

    def keep(self, file: IO[bytes], recipe: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
        """Write a packed file within `writing`, compare its bytes with their digest, and give it its name.

        Raise OSError where the system cannot write it, and NotKeptError if the file does not contain what was written.
        """
        size = sum(part.array.nbytes for part in parts.values())
        self._check_quota(size)
        self.prune(self.quota - size)
        self._make_space(size)
        write_parts(file, recipe, parts)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # Its pages are then read from the disk again, which checks the disk, and gives huge pages where they are.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            PackedFile(file.fileno()).check_bytes()
        except PackedFileError as error:
            raise NotKeptError(f"{self.folder} does not hold what was written: {error}") from None
        path = self._path(recipe)
        path.with_suffix(".tmp").replace(path)
        _sync_folder(self.folder)
        write_private(path.with_suffix(".checked"), identity_of(os.fstat(file.fileno())))

    def entries(self) -> list[Entry]:
        """Return the packed files, the least recently used first."""
        found = []
        for path in self.folder.glob("*.weights"):
            with contextlib.suppress(OSError):
                used = path.with_suffix(".checked")
                last_used = (used if used.exists() else path).stat().st_mtime
                found.append(Entry(path, path.stat().st_size, last_used, _files_of(path)))
        return sorted(found, key=lambda entry: entry.last_used)

    def prune(self, limit: int, wanted: Callable[[Entry], bool] = lambda entry: True) -> int:
        """Delete the wanted packed files, the least recently used first, until at most ``limit`` bytes of them are
        left, and the files that interrupted processes left. Return the number of bytes freed. Raise OSError where the
        system cannot delete them.

        Processes that have mapped a file keep it until they end.
        """
        entries = [entry for entry in self.entries() if wanted(entry)]
        left, freed = sum(entry.size for entry in entries), 0
        for entry in entries:
            if left <= limit:
                break
            entry.path.unlink(missing_ok=True)
            entry.path.with_suffix(".checked").unlink(missing_ok=True)
            left, freed = left - entry.size, freed + entry.size
        return freed + self._clear()

    def _clear(self) -> int:
        """Delete unfinished files that no process writes any more, and digests that have not been used for a long
        time.
        """
        freed = 0
        for path in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                freed += os.fstat(file.fileno()).st_size
                path.unlink()
        Digests().prune()
        return freed

    def _check_once(self, path: Path, file: PackedFile, identity: str) -> None:
        """Compare the bytes with their digest, unless that was done for a file with this identity, and record the time
        of use.
        """
        record = path.with_suffix(".checked")
        try:
            is_checked = record.is_file() and record.read_text() == identity and is_own(record.stat())
        except (OSError, ValueError):  # ValueError: what it has is not text
            is_checked = False
        with contextlib.suppress(OSError):
            if is_checked:
                os.utime(record)
            else:
                file.check_bytes()
                if not is_young(identity):
                    write_private(record, identity)

    def _path(self, recipe: Mapping[str, Any]) -> Path:
        text = json.dumps(recipe, sort_keys=True)
        return self.folder / f"{sha256(text.encode()).hexdigest()[:32]}.weights"

    def _make_folder(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not is_own(self.folder.stat()):
            raise NotKeptError(f"{self.folder} belongs to another user, or others may write to it")

    def _check_quota(self, size: int) -> None:
        if size > self.quota:
            raise NotKeptError(f"they have {_megabytes(size)}, more than weight_cache_bytes = {self.quota}")

    def _make_space(self, size: int) -> None:
        """Delete packed files, the least recently used first, if the disk has too little room for a file of this size.
        Raise NotKeptError, and delete none, if the room would not suffice without them either; raise it too if
        processes still map them.
        """
        needed, kept = size + _FREE_BYTES, sum(entry.size for entry in self.entries())
        lacking = needed - self._num_free()
        if 0 < lacking <= kept:
            self.prune(kept - lacking)
        if (free := self._num_free()) < needed:
            text = f"{_megabytes(size)}, and {_megabytes(_FREE_BYTES)} to spare, are needed"
            raise NotKeptError(f"{text}; {_megabytes(free)} are free in {self.folder}")

    def _num_free(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def _locked(path: Path, patience: float) -> Iterator[IO[bytes]]:
    """Hold the lock of a new file of this name, which only this user may read. Raise NotKeptError after this many
    seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        with os.fdopen(open_lock(path, 0o600), "r+b") as file:
            if _try_lock(file) and _is_named(file, path):
                file.truncate(0)  # a process left it that ended while it wrote
                yield file
                return
        if time.monotonic() > deadline:
            raise NotKeptError(f"another process has been writing {path} for {patience:.0f} s")
        time.sleep(_POLL)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _is_named(file: IO[bytes], path: Path) -> bool:
    """Return whether the name is still that of the open file, not of a later one."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files_of(path: Path) -> tuple[str, ...]:
    """Return the digests that a packed file names; an empty tuple for a damaged file."""
    with path.open("rb") as file:
        try:
            return tuple(map(str, read_recipe(file.fileno()).get("files", ())))
        except PackedFileError:
            return ()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
