"""The processes of the further ranks of a model: started, watched and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from threading import Thread, current_thread

import torch

from foreword.errors import EngineError
from foreword.executors.torch.packets import PacketRing, PacketWriter
from foreword.executors.torch.shard import Shards, too_late

_PROGRAM = "import sys; from foreword.executors.torch.parallel import run_rank; run_rank(*map(int, sys.argv[1:]))"


class Ranks:
    """Ranks 1, 2, … of ``size``, and a thread that ends all of them when one ends.

    Each has a connection for its start and its end; the steps travel through a `PacketRing`. The ranks find each other
    by a file in a directory that only this user can read, which is removed once no rank reads it any more.

    timeout: seconds that a packet, or the start, waits for a rank; then it is a TimeoutError.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._pid, self._timeout = os.getpid(), timeout
        self._store = TemporaryDirectory(prefix="foreword-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._reason: str | None = None
        self._shards: Shards | None = None
        self._thread = Thread(target=self._watch, name="foreword-ranks", daemon=True)
        ring = PacketRing(size - 1)
        try:
            for rank in range(1, size):
                self._start(rank, size, ring.descriptor)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ring.descriptor)
        self._packets = PacketWriter(ring, self._connections, self.check, timeout)

    def _start(self, rank: int, size: int, ring: int) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(Connection(ours.detach()))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            descriptors = theirs.fileno(), ring
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *map(str, (rank, size, *descriptors))],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            )

    def send_object(self, value: object) -> None:
        """Send a value to every rank while it starts."""
        for connection in self._connections:
            connection.send(value)

    def send(self, packet: bytes) -> None:
        """Send a packet to every rank that has joined."""
        self._packets.send(packet)

    def connect(self, shards: Shards, device: torch.device) -> None:
        """Wait until every rank has loaded its weights, and join them. device: that of rank 0. Raises the error of a
        rank that has not.
        """
        for rank, connection in enumerate(self._connections, 1):
            try:
                error = connection.recv()
            except (EOFError, OSError):
                raise EngineError(f"rank {rank} of the model ended while it was loaded") from None
            if error is not None:
                raise error
        path = os.path.join(self._store.name, "store")
        self.send_object(path)
        shards.connect(path, device)
        for rank, connection in enumerate(self._connections, 1):
            if not connection.poll(self._timeout):
                raise EngineError(f"rank {rank} of the model has not joined: {too_late(self._timeout)}")
            connection.recv()
        if device.type == "cpu":  # groups on GPUs read it with their first exchange
            self._store.cleanup()
        self._shards = shards
        self._thread.start()

    def check(self) -> None:
        """Raise EngineError if a rank has ended."""
        if self._reason is not None:
            raise EngineError(f"{self._reason}; make a new LLM")

    def failure(self, error: Exception) -> EngineError:
        """End all ranks. The error of a step that failed for ``error``."""
        self._thread.join(2)  # it ends if a rank has ended
        self.close(f"a step of rank 0 failed: {type(error).__name__}: {error}")
        return EngineError(f"{self._reason}; make a new LLM")

    def close(self, reason: str = "the ranks of the model were ended") -> None:
        """End all ranks. Closing twice is harmless, and nothing happens in a process forked from theirs."""
        if os.getpid() != self._pid:
            return
        self._reason = self._reason or reason
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._store.cleanup()
        shards, self._shards = self._shards, None
        if shards is not None:
            shards.abort()
        if self._thread.is_alive() and current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        ready = wait(self._connections)
        if self._reason is not None:
            return
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        codes = [process.poll() for process in self._processes]
        killed = [rank for rank, code in enumerate(codes, 1) if code is not None and code < 0]
        if killed:
            code = codes[killed[0] - 1] or 0
            self.close(f"rank {killed[0]} of the model was ended by {signal.Signals(-code).name}")
            return
        rank = next(i for i, connection in enumerate(self._connections, 1) if connection in ready)
        try:
            error = self._connections[rank - 1].recv()
            self.close(f"rank {rank} of the model failed: {type(error).__name__}: {error}")
        except (EOFError, OSError):
            self.close(f"rank {rank} of the model ended with status {codes[rank - 1]}")
