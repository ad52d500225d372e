"""Packets from one process to others on the same machine: a ring in shared memory, and a socket that rings for each.

    slot of chunk n = n mod 4        written: chunks so far        read[i]: chunks that reader i has copied

A packet is one chunk or several. The bytes are copied into the ring once, for all readers.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from multiprocessing.connection import Connection

import numpy as np

from foreword.arrays import I64
from foreword.executors.torch.shard import too_late

_NUM_SLOTS, _SLOT_BYTES = 4, 1 << 18
_LINE = 64  # bytes of a cache line: every counter has its own
_CHUNK = struct.Struct("<qq")  # number of the chunk; bytes of the packet from its start on
_POLL = 50e-6


class PacketRing:
    """The memory of one writer and ``num_readers`` readers. It has no name, and ends with the last process that has it.

    descriptor: of its file; None: a new one.
    """

    def __init__(self, num_readers: int, descriptor: int | None = None) -> None:
        start = num_readers * _LINE
        size = start + _NUM_SLOTS * _SLOT_BYTES
        self.descriptor = _new_file(size) if descriptor is None else descriptor
        self._memory = mmap(self.descriptor, size)
        self.read: I64 = np.frombuffer(self._memory, np.int64, num_readers * _LINE // 8)[:: _LINE // 8]
        self._slots = memoryview(self._memory)[start:]

    def slot(self, chunk: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of the slot of a chunk."""
        start = chunk % _NUM_SLOTS * _SLOT_BYTES
        return self._slots[start : start + size]


class PacketWriter:
    """Sends packets to the readers behind ``connections``, in their order. check: raises if a reader has ended.
    timeout: seconds that a part of a packet waits for room.
    """

    def __init__(
        self, ring: PacketRing, connections: Sequence[Connection], check: Callable[[], None], timeout: float
    ) -> None:
        self._ring, self._connections, self._check, self._timeout = ring, connections, check, timeout
        self._written = 0

    def send(self, packet: bytes) -> None:
        """Send one packet of at least a byte.

        Raise OSError if a reader has ended, TimeoutError if one does not read.
        """
        left = memoryview(packet)
        while left:
            end = time.monotonic() + self._timeout
            while self._written - int(self._ring.read.min()) >= _NUM_SLOTS:
                self._check()
                if time.monotonic() > end:
                    raise too_late(self._timeout)
                time.sleep(_POLL)
            size = min(len(left), _SLOT_BYTES)
            self._ring.slot(self._written, size)[:] = left[:size]
            bell = _CHUNK.pack(self._written, len(left))
            self._written += 1
            for connection in self._connections:
                connection.send_bytes(bell)
            left = left[size:]


class PacketReader:
    """Receives the packets of a writer as reader ``index``."""

    def __init__(self, ring: PacketRing, connection: Connection, index: int) -> None:
        self._ring, self._connection, self._index, self._chunk = ring, connection, index, 0

    def receive(self) -> bytes:
        """Wait for the next packet. EOFError once the writer has ended."""
        parts = []
        while True:
            chunk, left = _CHUNK.unpack(self._connection.recv_bytes())
            assert chunk == self._chunk, "every chunk is read, in order"
            parts.append(bytes(self._ring.slot(chunk, min(left, _SLOT_BYTES))))
            self._chunk += 1
            self._ring.read[self._index] = self._chunk
            if left <= _SLOT_BYTES:
                return b"".join(parts)


def _new_file(size: int) -> int:
    """Return the descriptor of a file of zeros, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("foreword")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
