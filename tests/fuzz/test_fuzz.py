"""A short run of the fuzzer with a fixed seed, and the fuzzer itself on readers that fail on purpose."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import foreword
from foreword.errors import ModelError
from fuzz.runner import run
from fuzz.target import Corpus, Target, names

TESTS = Path(__file__).parents[1]


@pytest.mark.long
def test_every_reader_accepts_or_refuses_what_it_is_given(tmp_path):
    command = [sys.executable, "-m", "fuzz", "--seed", "1", "--cases", "25", "--failures", str(tmp_path / "failures")]
    source = Path(foreword.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "cli", source)))}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{name} " in done.stdout for name in names())


def crash(data, folder):
    if data == b"crash":
        os.abort()


def hang(data, folder):
    if data == b"hang":
        time.sleep(100)


def allocate(data, folder):
    bytearray(len(data) << 28)


def refuse(data, folder):
    raise ModelError("refused")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("read", "data", "outcome", "seconds"),
    [
        (crash, b"crash", "died with status -6", 60),
        (hang, b"hang", "no end after 1 s", 1),
        (allocate, b"much", "MemoryError", 60),
        (lambda data, folder: [][1], b"", "IndexError", 60),
        (lambda data, folder: sys.exit(1), b"", "SystemExit", 60),
        (refuse, b"", "a valid input was refused", 60),
    ],
)
def test_a_failure_is_reported_and_the_next_case_runs(monkeypatch, read, data, outcome, seconds):
    target = Target(lambda: [data, b""], read, seconds=seconds)
    monkeypatch.setattr("fuzz.target.load", lambda name: target)
    report = run(Corpus("x", 0))
    (case, what, _), *_ = report.failures.values()
    assert case == 0
    assert outcome in what
    assert report.outcomes.total() == 2


def test_memory_that_the_heap_of_the_parent_has_free_counts_for_the_limit(monkeypatch):
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = (
        [ctypes.c_size_t],
        ctypes.c_void_p,
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(31 << 20))  # from now on, smaller pieces are parts of the heap
    pieces = [libc.malloc(16 << 20) for _ in range(80)]
    end = libc.malloc(1 << 20)  # while it is there, the heap keeps the pieces
    for piece in pieces:
        libc.free(piece)
    monkeypatch.setattr("fuzz.target.load", lambda name: Target(lambda: [b"much"], allocate))
    report = run(Corpus("x", 0))
    libc.free(end)
    assert [what for _, what, _ in report.failures.values() if "MemoryError" in what]


def test_a_refusal_is_no_failure_unless_the_input_is_valid(monkeypatch):
    target = Target(list, refuse, hostile=lambda: [b"x"])
    monkeypatch.setattr("fuzz.target.load", lambda name: target)
    assert run(Corpus("x", 0)).outcomes == {"refused": 1}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", names())
def test_a_case_depends_on_seed_and_number_alone(name):
    first, again, other = Corpus(name, 1), Corpus(name, 1), Corpus(name, 2)
    cases = range(first.num_fixed, first.num_fixed + 5)
    assert [first[i] for i in cases] == [again[i] for i in reversed(cases)][::-1]
    assert [first[i] for i in cases] != [other[i] for i in cases]
