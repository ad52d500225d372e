"""Blocks on disk, written by a thread in the background, in files that several processes share.

    DIRECTORY/blocks-KEY/NAME.blocks      KEY: of the format of the blocks; NAME: random

Blocks that are offered together, which follow each other in a prompt as a rule, share a file (`foreword.cache.segment`)
of up to SEGMENT_BYTES. Processes agree without locks: a file gets its name when it is whole, its content never changes,
and a file that another process removed is a block that is not there. Its time of change is that of its last use; before
a file is written, the least recently used files of all models make room for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock, Thread, current_thread
from typing import Literal

import numpy as np

from foreword.arrays import U8, Bools
from foreword.cache.segment import (
    SUFFIX,
    DamagedError,
    Segment,
    read_blocks,
    read_segment,
    segment_bytes,
    write_segment,
)
from foreword.cache.tiers import QUEUE_BYTES, BlockFormat
from foreword.errors import ConfigError, reason_of
from foreword.ownership import is_own, make_folder

SEGMENT_BYTES = 8 << 20
"""The size of the largest file, unless one block is larger."""
FOLDER = "blocks-"
_ABANDONED = 3600.0  # seconds after which a file that was not finished is one of a process that was killed
_SETTLED = 20_000_000  # nanoseconds after which a directory's time of change tells that nothing was added since
_SHARE_KEPT = 15 / 16  # the part of the capacity that is left when files are removed
_CLOSE_SECONDS = 30.0

_LOGGER = logging.getLogger("foreword.cache")

Offer = tuple[tuple[bytes, ...], U8]


class DiskTier:
    """A `BlockTier` in a directory, which takes computed blocks.

    capacity: bytes of the files of all models in the directory; each process that writes may exceed it by one file.
    num_written, num_dropped: blocks that were saved, and those that could not be. Raise ConfigError for a directory
    that cannot be used, and for a capacity of less than one block.
    """

    name = "disk"
    takes: Literal["computed", "evicted"] = "computed"

    def __init__(self, directory: Path, blocks: BlockFormat, *, capacity: int) -> None:
        least = segment_bytes(blocks, 1)
        if capacity < least:
            raise ConfigError(f"cache_bytes={capacity}: a block takes {least} bytes; give at least that many")
        self._root, self._blocks, self._capacity = directory, blocks, capacity
        self._folder = directory / (FOLDER + blocks.key.hex())
        self.num_written = self.num_dropped = 0
        self._lock = Lock()
        self._segments: dict[str, Segment] = {}
        self._places: dict[bytes, tuple[str, int]] = {}  # name of a block → name of its file, index in it
        self._foreign: set[str] = set()  # names of files that are not of this format
        self._seen = -1
        self._reported: set[str] = set()
        self._queue: deque[Offer] = deque()
        self._queued: set[bytes] = set()
        self._num_queued = 0  # bytes
        self._changed = Condition(self._lock)
        self._is_closed = self._is_writing = False
        try:
            make_folder(self._folder, 0o700)
            if not is_own(self._folder.stat()):
                raise ConfigError(
                    f"cache_dir={str(directory)!r:.200}: {self._folder.name} belongs to another user, or others may "
                    "write to it, and answers follow from what it holds. Give a directory of your own"
                )
            probe = self._folder / f"probe-{secrets.token_hex(8)}"
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
            self._refresh()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cache_dir={str(directory)!r:.200}: cannot be written ({reason_of(error)}). Give another directory, "
                "or leave it out"
            ) from None
        self._thread = Thread(target=self._write_all, name="foreword-disk-cache", daemon=True)
        self._thread.start()

    # -- lookups -----------------------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes]) -> Bools:
        with self._lock:
            with suppress(OSError):
                self._refresh()
            return np.fromiter((name in self._places for name in names), np.bool_, len(names))

    def read(self, names: Sequence[bytes], data: U8) -> Bools:
        done = np.zeros(len(names), np.bool_)
        by_file: dict[str, tuple[Segment, list[int], list[int]]] = {}  # blocks of a file, and their places in data
        with self._lock:
            for row, name in enumerate(names):
                if (place := self._places.get(name)) is not None:
                    _, indices, rows = by_file.setdefault(place[0], (self._segments[place[0]], [], []))
                    indices.append(place[1])
                    rows.append(row)
        for segment, indices, rows in by_file.values():
            try:
                read_blocks(segment, indices, self._blocks, data, rows)
                os.utime(segment.path)
            except FileNotFoundError:
                self._forget(segment)  # another process made room
            except (OSError, DamagedError) as error:
                self._discard(segment, error)
            else:
                done[rows] = True
        return done

    def _refresh(self) -> None:
        """Follow the files that were added to the folder and removed from it, by this process or another one."""
        changed = self._folder.stat().st_mtime_ns
        if changed == self._seen:
            return
        now = time.time_ns()
        there = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)}
        for name in self._segments.keys() - there:
            self._remove(self._segments[name])
        for name in there - self._segments.keys() - self._foreign:
            try:
                self._add(read_segment(self._folder / name, self._blocks))
            except FileNotFoundError:
                continue
            except (OSError, DamagedError) as error:
                self._foreign.add(name)
                self._report("damaged", f"{error}; it is left out, and removed when room is needed")
        # What was added within the same tick of the clock may not be listed.
        self._seen = changed if now - changed > _SETTLED else -1

    def _add(self, segment: Segment) -> None:
        self._segments[segment.path.name] = segment
        for index, name in enumerate(segment.names):
            self._places.setdefault(name, (segment.path.name, index))

    def _remove(self, segment: Segment) -> None:
        self._segments.pop(segment.path.name, None)
        for name in segment.names:
            if self._places.get(name, ("", 0))[0] == segment.path.name:
                del self._places[name]

    def _forget(self, segment: Segment) -> None:
        with self._lock:
            self._remove(segment)

    def _discard(self, segment: Segment, error: Exception) -> None:
        """Remove a file whose blocks cannot be read: they are computed again."""
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        self._report("damaged", f"{reason}; the blocks of this file are computed again")
        self._forget(segment)
        with suppress(OSError):
            segment.path.unlink()

    def _report(self, kind: str, message: str) -> None:
        """Log the first problem of each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            _LOGGER.warning("prefix cache on disk: %s", message)

    # -- writing -----------------------------------------------------------------------------------------------------

    def wants(self, names: Sequence[bytes]) -> Bools:
        with self._lock:
            wanted = np.fromiter(
                (name not in self._places and name not in self._queued for name in names), np.bool_, len(names)
            )
            room = max((QUEUE_BYTES - self._num_queued) // self._blocks.block_bytes, 0)
            over = np.flatnonzero(wanted)[room:]
            wanted[over] = False
            self.num_dropped += len(over)
        return wanted

    def offer(self, names: Sequence[bytes], data: U8) -> None:
        step = max(1, min(SEGMENT_BYTES, self._capacity // 8) // self._blocks.block_bytes)
        with self._lock:
            for start in range(0, len(names), step):
                part = tuple(names[start : start + step])
                self._queue.append((part, data[start : start + step]))
                self._queued.update(part)
                self._num_queued += len(part) * self._blocks.block_bytes
            self._changed.notify_all()

    def flush(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._queue and not self._is_writing, _CLOSE_SECONDS)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not current_thread():  # which may collect garbage, too
            self._thread.join(_CLOSE_SECONDS)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                self._is_writing = True
                names, data = self._queue.popleft()
            segment = self._written(names, data)
            with self._lock:
                self._num_queued -= len(names) * self._blocks.block_bytes
                self._queued.difference_update(names)
                if segment is not None:
                    self._add(segment)
            del names, data

    def _written(self, names: tuple[bytes, ...], data: U8) -> Segment | None:
        """Write a file. Return None if that failed, which is reported once."""
        path = self._folder / (secrets.token_hex(16) + SUFFIX)
        try:
            make_folder(self._folder, 0o700)  # the directory may be emptied
            self._make_room(segment_bytes(self._blocks, len(names)))
            segment = write_segment(path, self._blocks, names, data)
        except OSError as error:
            self.num_dropped += len(names)
            self._report("unwritten", f"{self._root}: cannot be written ({reason_of(error)}); blocks are not saved")
            return None
        self.num_written += len(names)
        return segment

    def _make_room(self, size: int) -> None:
        """Remove files, the least recently used first, until one of ``size`` bytes fits."""
        files = sorted(self._files())
        total, most = sum(file[1] for file in files), self._capacity - size
        if total <= most:
            return
        for _, file_size, path in files:
            if total <= min(most, self._capacity * _SHARE_KEPT):
                break
            with suppress(OSError):
                path.unlink()
            total -= file_size
            if path.parent == self._folder:
                with self._lock:
                    self._foreign.discard(path.name)
                    if (segment := self._segments.get(path.name)) is not None:
                        self._remove(segment)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Return (time of the last use, size, path) of the files of all models. Remove files of killed processes."""
        now = time.time()
        for folder in self._root.glob(f"{FOLDER}*"):
            with suppress(OSError):
                for entry in os.scandir(folder):
                    with suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(".part") and now - found.st_mtime > _ABANDONED:
                            os.unlink(entry.path)
                        elif entry.name.endswith((SUFFIX, ".part")):
                            yield found.st_mtime, found.st_size, Path(entry.path)
