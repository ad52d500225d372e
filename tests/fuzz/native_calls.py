"""Calls of every function of the native module with damaged arguments, in the states in which tests call them.

    python tests/fuzz/native_calls.py tests/kernels tests/batch        or: make native-calls

Runs tests. When one calls a function of `foreword._native`, a forked process calls it again and again with damaged
arguments: other types, dtypes, shapes, strides, orders and numbers. Each call may return or raise an exception; a
process that ends otherwise is reported with what it called. Functions of `_native.pyi` that no test has called are
reported, too.
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.update(FOREWORD_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import pytest

from foreword.native import native

ODD_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    17,
    2**7,
    2**12,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**40,
    2**63 - 1,
    -(2**63),
    2**63,
    2**70,
)
ODD_FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e30, 1e308, float("nan"), float("inf"), float("-inf"))
ODD_OBJECTS = (
    None,
    True,
    3,
    1.5,
    "",
    "x" * 5000,
    "\ud800",
    b"\0",
    [],
    [None],
    {},
    {"a": 1},
    object(),
    len,
    np.zeros(()),
)
DTYPES = ("f8", "f4", "f2", "i1", "u1", "i4", "i8", "u4", ">i4", ">f4", "c8", "?", "O", "U4", "M8[s]")
TRUSTED = {
    *(
        (name, "__init__")
        for name in ("RowsCore", "StepCore", "StepBuffers", "PacketCore", "VllmFastPath", "StepCache")
    ),
    ("RowsCore", "add_table"),
    ("StepCore", "add_group"),
    ("PacketCore", "add_table"),
    ("PacketCore", "set_embeddings"),
}
"""Functions that keep the addresses of arrays of `RequestStates` and `InputBuffers`. Each is called in one place, with
arrays that are made from the tables that the native module has, too: only arguments of other types are given to them.
"""
MEMORY = 1 << 30  # bytes that a process may use beyond those of its parent
CPU_SECONDS = 60
SECONDS = 600


def functions(pyi: Path) -> Iterator[tuple[str, str]]:
    """(class or "", function) of all functions with arguments in the types of the native module; a constructor is
    __init__.
    """
    for node in ast.parse(pyi.read_text()).body:
        class_name = node.name if isinstance(node, ast.ClassDef) else ""
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef) and all(ast.unparse(d) == "overload" for d in one.decorator_list):
                arguments = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
                if len(arguments) > (class_name != ""):
                    yield class_name, one.name


def damaged(rng: np.random.Generator, value: Any, depth: int = 0) -> Any:
    """Return another value, most often of the same type."""
    if rng.random() < 0.1:
        return ODD_OBJECTS[rng.integers(len(ODD_OBJECTS))]
    match value:
        case np.ndarray():
            return damaged_array(rng, value)
        case bool():
            return bool(rng.integers(2))
        case int():
            return ODD_NUMBERS[rng.integers(len(ODD_NUMBERS))]
        case float():
            return ODD_FLOATS[rng.integers(len(ODD_FLOATS))]
        case dict() if value and depth < 3:
            changed, key = dict(value), list(value)[rng.integers(len(value))]
            if rng.random() < 0.2:
                del changed[key]
            else:
                changed[key] = damaged(rng, value[key], depth + 1)
            return changed
        case list() | tuple() if value and depth < 3:
            items, at = list(value), rng.integers(len(value))
            if (chance := rng.random()) < 0.15:
                del items[at]
            elif chance < 0.3:
                items = items * 2
            else:
                items[at] = damaged(rng, items[at], depth + 1)
            return type(value)(items) if type(value) in (list, tuple) else items
        case str():
            return ("", value + "x", value[:1], "\0", "é" * 300)[rng.integers(5)]
        case _:
            return ODD_OBJECTS[rng.integers(len(ODD_OBJECTS))]


def other_type(rng: np.random.Generator, value: Any) -> Any:
    """Return a value of another type."""
    others = [one for one in ODD_OBJECTS if not isinstance(one, type(value)) and not isinstance(value, bool)]
    return others[rng.integers(len(others))] if others else value


def damaged_array(rng: np.random.Generator, array: np.ndarray) -> Any:
    match rng.integers(12):
        case 0:
            with np.errstate(all="ignore"):
                return array.astype(DTYPES[rng.integers(len(DTYPES))], casting="unsafe")
        case 1:
            return array[: len(array) // 2] if array.ndim else array.reshape(1)
        case 2:
            return array[..., :0] if array.ndim else np.zeros(0, array.dtype)
        case 3:
            return np.stack([array, array])
        case 4:
            return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array  # not contiguous
        case 5:
            return array[::-1] if array.ndim else array
        case 6:
            return np.broadcast_to(array.reshape(-1)[:1], array.shape) if array.size else array  # strides of 0
        case 7:
            data = bytearray(array.nbytes + 1)
            moved = np.frombuffer(data, np.uint8)[1:].view(array.dtype) if array.dtype != object else array
            return moved.reshape(array.shape)  # not aligned
        case 8:
            fixed = array.copy()
            fixed.flags.writeable = False
            return fixed
        case _ if array.size and array.dtype.kind in "iu":
            changed, limits = array.copy(), np.iinfo(array.dtype)
            for _ in range(rng.integers(1, 4)):
                odd = min(max(ODD_NUMBERS[rng.integers(len(ODD_NUMBERS))], limits.min), limits.max)
                changed.flat[int(rng.integers(array.size))] = odd
            return changed
        case _ if array.size and array.dtype.kind == "f":
            changed = array.copy()
            with np.errstate(all="ignore"):
                odd = np.array(ODD_FLOATS[rng.integers(len(ODD_FLOATS))]).astype(array.dtype)
            changed.flat[int(rng.integers(array.size))] = odd
            return changed
        case _:
            return array[:-1] if array.ndim and len(array) else array


class HostileCalls:
    """A plugin of pytest. runs: forked processes per function and test. calls: damaged calls of each process."""

    def __init__(self, runs: int, calls: int, most: int, seed: int) -> None:
        self._runs, self._calls, self._most, self._seed = runs, calls, most, seed
        self._test, self._begun = "", Counter[tuple[str, str, str]]()
        self._last: dict[tuple[str, str], tuple[tuple, dict]] = {}
        self.num_runs: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self._is_inside = False
        every = dict.fromkeys(functions(Path(native.__file__).parent / "_native.pyi"))
        owners = {class_name: getattr(native, class_name) if class_name else native for class_name, _ in every}
        for class_name, name in every:
            is_class = name == "__init__"
            self._wrap(class_name, name, native if is_class else owners[class_name], class_name if is_class else name)

    def _wrap(self, class_name: str, name: str, owner: Any, attribute: str) -> None:
        function = owner.__dict__[attribute]

        @wraps(function, updated=())
        def called(*args: Any, **options: Any) -> Any:
            if "num_threads" in options:
                options["num_threads"] = 1  # the threads of a pool do not exist after a fork
            if not self._is_inside:
                self._is_inside = True
                try:
                    self._attack((class_name, name), function, args, options)
                finally:
                    self._is_inside = False
            return function(*args, **options)

        setattr(owner, attribute, called)

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    def _attack(self, of: tuple[str, str], function: Callable, args: tuple, options: dict) -> None:
        self._last[of] = args, options
        if threading.active_count() > 1:  # a lock that another thread holds is never free after a fork
            return
        if self._begun[*of, self._test] >= self._runs or self.num_runs[of] >= self._most:
            return
        self._begun[*of, self._test] += 1
        self.num_runs[of] += 1
        seed = zlib.crc32(f"{self._seed} {of} {self.num_runs[of]}".encode())
        with tempfile.TemporaryFile() as report:
            child = os.fork()
            if not child:
                self._child(of, function, args, options, seed, report.fileno())
            _, status = os.waitpid(child, 0)
            if status:
                report.seek(0)
                text = report.read().decode(errors="replace")
                what = ".".join(part for part in of if part)
                code = os.waitstatus_to_exitcode(status)
                self.failures.append(f"{what} in {self._test}: the process ended with {code}\n{text[:2500]}")

    def _child(self, of, function, args, options, seed, report: int) -> None:
        """Call until a call ends the process, or all have returned or raised."""
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.dup2(report, 2)
            faulthandler.enable(report)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            rng = np.random.default_rng(seed)
            for _ in range(self._calls):
                self._call(rng, of, function, args, options, report)
            status = 0
        except BaseException as error:
            os.write(report, f"\n{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(status)

    def _call(self, rng, of, function, args, options, report: int) -> None:
        own = int(of[0] != "" and of[1] != "__init__")  # self
        given, named = list(args), dict(options)
        places = [*range(own, len(given)), *named]
        for place in rng.permutation(len(places))[: rng.integers(0, 3)].tolist():
            key = places[place]
            change = other_type if of in TRUSTED else damaged
            if isinstance(key, int):
                given[key] = change(rng, given[key])
            else:
                named[key] = change(rng, named[key])
        text = f"{given[own:]!r:.1500} {named!r:.1500}\n".encode(errors="replace")
        os.ftruncate(report, 0)
        os.pwrite(report, text, 0)
        os.lseek(report, len(text), 0)
        try:
            made = function(*given, **named)
        except SystemError:
            raise
        except Exception:
            return
        if of[1] == "__init__" and of not in TRUSTED:
            self._use(rng, of[0], made, report)

    def _use(self, rng, class_name: str, made: Any, report: int) -> None:
        """Call the methods of a new object in any order, with the arguments of another object."""
        known = [one for one in self._last if one[0] == class_name and one[1] != "__init__"]
        for at in rng.permutation(len(known))[:6].tolist():
            (_, *args), options = self._last[known[at]]
            os.pwrite(report, f"then {known[at][1]}\n".encode(), os.lseek(report, 0, 2))
            try:
                getattr(type(made), known[at][1]).__wrapped__(made, *args, **options)
            except SystemError:
                raise
            except Exception:
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="processes per function and test")
    parser.add_argument("--most", type=int, default=1000, help="processes per function")
    parser.add_argument("--calls", type=int, default=100, help="damaged calls of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--some", action="store_true", help="the tests need not call every function")
    given, arguments = parser.parse_known_args()
    hostile = HostileCalls(given.runs, given.calls, given.most, given.seed)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[hostile])
    for failure in hostile.failures:
        print(failure)
    every = dict.fromkeys(functions(Path(native.__file__).parent / "_native.pyi"))
    missed = [".".join(part for part in one if part) for one in every if not hostile.num_runs[one]]
    print(f"{len(every)} functions; {hostile.num_runs.total()} processes of {given.calls} calls; "
          f"{len(hostile.failures)} ended otherwise than by returning or raising")  # fmt: skip
    if missed:
        print("not called by these tests:", ", ".join(missed))
    sys.exit(bool(status or hostile.failures or (missed and not given.some)))


if __name__ == "__main__":
    main()
