"""Runs cases in a worker process with limits of memory and time, and reports those that end otherwise than they may."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from foreword.errors import ForewordError
from fuzz.target import Corpus, Target

ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"


@dataclass
class Report:
    """Outcomes of a target's cases. failures: cause → (its first case, what happened, number of cases)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[int, str, int]] = field(default_factory=dict)


def run(corpus: Corpus, *, num_cases: int | None = None, seconds: float | None = None) -> Report:
    """Run the fixed cases, then mutations: ``num_cases`` of them, or for ``seconds``; both None: the fixed ones."""
    end = time.monotonic() + (seconds or 0)

    def cases() -> Iterator[int]:
        yield from range(corpus.num_fixed)
        case = corpus.num_fixed
        while time.monotonic() < end or case < corpus.num_fixed + (num_cases or 0):
            yield case
            case += 1

    report = Report()
    for case, outcome in outcomes(corpus.target, ((case, corpus[case]) for case in cases())):
        if outcome == REFUSED and case < len(corpus.valid):
            outcome = "a valid input was refused"
        if outcome not in (ACCEPTED, REFUSED):
            first, what, count = report.failures.get(_cause(outcome), (case, outcome, 0))
            report.failures[_cause(outcome)] = first, what, count + 1
            outcome = FAILED
        report.outcomes[outcome] += 1
    return report


def _cause(outcome: str) -> str:
    """The line that raised the exception; for other failures their first line."""
    lines = outcome.splitlines()
    return next((line for line in reversed(lines) if line.lstrip().startswith("File ")), lines[0])


def outcomes(target: Target, cases: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """(case, outcome) of each input. A worker that dies or exceeds the time is replaced by a new one."""
    with contextlib.ExitStack() as stack:
        worker = None
        for case, data in cases:
            worker = worker or stack.enter_context(_Worker(target))
            outcome = worker.run(data)
            if outcome not in (ACCEPTED, REFUSED):
                stack.close()
                worker = None
            yield case, outcome


class _Worker:
    """A process that reads inputs, one at a time."""

    def __init__(self, target: Target) -> None:
        self._seconds = target.seconds
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        (Path(self._folder.name) / "files").mkdir()
        self._process = fork.Process(target=_serve, args=(target, theirs, Path(self._folder.name)), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, data: bytes) -> str:
        self._pipe.send_bytes(data)
        if not self._pipe.poll(self._seconds):
            return f"no end after {self._seconds:g} s\n{self._where()}"
        try:
            return self._pipe.recv_bytes().decode(errors="replace")
        except EOFError:
            self._process.join()
            return f"the process died with status {self._process.exitcode}\n{self._said()}"

    def _where(self) -> str:
        """The Python stack of a process that does not end."""
        os.kill(self._process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        return self._said()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-3000:]

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _use_free_heap() -> None:
    """Allocate what the heap has free in pieces of 1 MiB and more. The limit of the address space would not hold for
    allocations there, and the heap of the parent may have any size. Nothing of it is written, so it takes no memory.
    """
    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space(), hard))
    for exponent in range(40, 19, -1):
        while allocate(1 << exponent):
            pass
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _serve(target: Target, pipe: Connection, folder: Path) -> None:
    """The worker: from inputs to outcomes. Its standard error goes to a file, for the report."""
    sys.stderr = (folder / "stderr").open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    _use_free_heap()
    limit = _address_space() + target.memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:
            return
        try:
            target.read(data, folder / "files")
            outcome = ACCEPTED
        except ForewordError:
            outcome = REFUSED
        except BaseException:  # also PanicException of Rust and SystemExit
            outcome = traceback.format_exc(limit=-8)
        pipe.send_bytes(outcome.encode(errors="replace"))
