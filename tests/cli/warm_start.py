"""Processes that begin with Foreword imported: a process that has imported it forks one for each request.

A start of Python with Foreword and its packages takes half a second of CPU time, a fork a few milliseconds. The forked
process has a session, a folder, an environment and streams of its own, runs a program as ``python -c`` does, and ends
as any process. What Python itself reads when it starts (`READ_BY_PYTHON`) cannot change, and needs a start.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

READ_BY_PYTHON = ("PYTHON", "LC_", "LANG", "LD_", "OPENBLAS_", "OMP_")
"""Beginnings of the names of variables that act when Python or a library starts."""
MODULES = (
    "foreword.cli.batch", "foreword.cli.chat", "foreword.cli.run", "foreword.cli.serve", "foreword.engine.llm",
    "foreword.executors.native", "foreword.models.gguf", "foreword.server.app", "foreword.server.listener",
    "foreword.cluster.cluster", "jinja2.sandbox", "tokenizers", "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)  # fmt: skip
"""What commands import when they run."""
_SIZE = 8  # bytes of the length before a request


class Process:
    """A process that was forked elsewhere, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, streams: Sequence[io.BufferedIOBase | None]) -> None:
        self.pid, self.returncode = pid, None
        self._status = status  # the pipe that gets the exit status
        self.stdin, self.stdout, self.stderr = streams

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._read_status()
        return self.returncode

    def _read_status(self) -> None:
        status = os.read(self._status, 4)
        os.close(self._status)
        assert status, "the process that waits for this one was ended"
        self.returncode = int.from_bytes(status, sys.byteorder, signed=True)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write the input and close it, read both outputs, and wait. subprocess.TimeoutExpired after ``timeout``."""
        found: dict[io.BufferedIOBase, bytes] = {}
        outputs = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        threads = [threading.Thread(target=self._write, args=(input or b"",), daemon=True)] if self.stdin else []
        threads += [
            threading.Thread(target=lambda one=one: found.update({one: one.read()}), daemon=True) for one in outputs
        ]
        for thread in threads:
            thread.start()
        until = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        self._close()
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return found.get(self.stdout, b""), found.get(self.stderr, b"")

    def _write(self, content: bytes) -> None:
        try:
            self.stdin.write(content)
            self.stdin.close()
        except BrokenPipeError:
            pass  # the process ended before it read everything

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def _close(self) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class WarmStart:
    """The process that forks, which ends when the process that made it does."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            folder = os.path.dirname(__file__)
            code = f"import sys; sys.path.insert(1, {folder!r}); import warm_start; del sys.path[1]\n"
            code += f"exec(warm_start.serve({theirs.fileno()}))"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env
            )

    def start(
        self, program: str, arguments: Sequence[str], streams: Mapping[str, object], *,
        cwd: str | Path, env: Mapping[str, str], start_new_session: bool = False,
    ) -> Process:  # fmt: skip
        """Fork a process that runs a program. streams: as those of `subprocess.Popen`."""
        given, ours, to_close = [], [], []
        for name, stream in streams.items():
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                here, there = (write, read) if name == "stdin" else (read, write)
                ours.append(os.fdopen(here, "wb" if name == "stdin" else "rb"))
                to_close.append(there)
            elif stream == subprocess.STDOUT:
                there = given[1]
                ours.append(None)
            else:
                if stream == subprocess.DEVNULL:
                    to_close.append(there := os.open(os.devnull, os.O_RDWR))
                else:
                    there = stream if isinstance(stream, int) else stream.fileno()
                ours.append(None)
            given.append(there)
        status, theirs = os.pipe()
        request = json.dumps([program, list(arguments), str(cwd), dict(env), start_new_session]).encode()
        socket.send_fds(self._socket, [len(request).to_bytes(_SIZE, "big")], [*given, theirs])
        self._socket.sendall(request)
        for descriptor in (*to_close, theirs):
            os.close(descriptor)
        return Process(int.from_bytes(os.read(status, 4), sys.byteorder), status, ours)


def serve(descriptor: int) -> str:
    """Fork a process for each request. Returns in that process: the program that it is to run."""
    from typer.testing import CliRunner  # here, since the process that asks does not need them

    from foreword.cli.app import app

    for name in MODULES:
        importlib.import_module(name)
    CliRunner().invoke(app, ["run", "--help"])  # imports what Typer needs of its packages
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, _SIZE, 4)
        if not head:
            os._exit(0)  # whoever asks has ended
        size, body = int.from_bytes(head, "big"), b""
        while len(body) < size:
            body += requests.recv(size - len(body))
        if os.fork() == 0:
            break
        for one in descriptors:
            os.close(one)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    requests.close()
    *streams, status = descriptors
    pid = os.fork()
    if pid:  # the parent that waits
        os.closerange(0, 3)
        for one in streams:
            os.close(one)
        os.write(status, pid.to_bytes(4, sys.byteorder))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, code.to_bytes(4, sys.byteorder, signed=True))
        os._exit(0)
    os.close(status)
    program, arguments, cwd, env, start_new_session = json.loads(body)
    if start_new_session:
        os.setsid()
    for number, one in enumerate(streams):
        os.dup2(one, number)
    for one in set(streams):
        os.close(one)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding=encoding)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding=encoding, buffering=1 if os.isatty(1) else -1)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace", buffering=1)
    return program
