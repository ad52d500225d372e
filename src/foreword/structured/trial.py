"""Compile each grammar in a separate process first. llguidance may search for ever whether a grammar allows any text,
and a process, unlike a thread, can be stopped.
"""

from __future__ import annotations

import ctypes
import pickle
import resource
import select
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, BinaryIO

from foreword.batch import StructuredOutputs
from foreword.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import subprocess

STACK_BYTES = (
    1 << 29
)  # llguidance recurses once per reference in a grammar; references in the longest text need half of this
MEMORY_BYTES = 1 << 28  # most memory of one grammar
SIZE = 8  # bytes of an answer from the process


class BusyError(Exception):
    """Other grammars are being compiled, and this one waited too long."""


class TooLargeError(Exception):
    """The grammar takes more memory than allowed."""


class Trial:
    """Compile grammars over one vocabulary, one at a time, in a separate process. It may be used from any thread.

    The process begins with the first grammar, and again after one that exceeded a limit. It ends with this object.
    """

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int = MEMORY_BYTES) -> None:
        self._content = pickle.dumps(
            (vocabulary.tokens, vocabulary.special_tokens, vocabulary.eos_token_ids, memory_bytes),
            pickle.HIGHEST_PROTOCOL,
        )
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Trial] | None = None

    def compile(self, value: StructuredOutputs, seconds: float) -> int:
        """Return the memory of the grammar in bytes if llguidance compiles or refuses it within its limits.

        Raise TimeoutError after these seconds, BusyError after the same time of waiting for other grammars, and
        TooLargeError.
        """
        if not self._turn.acquire(timeout=seconds):
            raise BusyError
        done = b""
        try:
            source, answers = self._pipes()
            with suppress(BrokenPipeError):
                pickle.dump(value, source)
                source.flush()
                if not select.select([answers], [], [], seconds)[0]:
                    raise TimeoutError
                done = answers.read(SIZE)
        finally:
            if len(done) < SIZE:
                self._stop()
            self._turn.release()
        if len(done) < SIZE:
            raise TooLargeError
        return int.from_bytes(done, "little")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the pipes to and from the process, which has built its tables."""
        process = self._process
        if process is None:
            import subprocess  # imported here, because it takes 3 ms, which every start would need

            program = f"import sys; sys.path[:] = {sys.path!r}; from foreword.structured import trial; trial.main()"
            # The process has its own session, so that Ctrl-C does not end it.
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._end = weakref.finalize(self, _end, process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._content)
            process.stdin.flush()
            if not process.stdout.read(SIZE):
                raise ChildProcessError("the process in which grammars are tried does not start")
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class _Tokens:
    """A vocabulary that was sent to the process, without its tokenizer: it cannot tokenize texts."""

    def __init__(self, tokens: list[bytes], special_tokens: Mapping[str, int]) -> None:
        self._tokens, self.special_token_ids = tokens, special_tokens
        self.vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


def _compile_all(source: BinaryIO, answers: BinaryIO) -> None:
    from foreword.structured.backend import Backend  # needs llguidance, which is optional

    tokens, special_tokens, eos_token_ids, memory_bytes = pickle.load(source)
    made = Vocabulary(_Tokens(tokens, special_tokens), vocab_size=len(tokens), eos_token_ids=eos_token_ids)
    backend = Backend(made)
    _answer(answers, 0)
    _limit_memory(memory_bytes)
    while True:
        try:
            value = pickle.load(source)
        except EOFError:
            return
        before, grammar = _resident(), None
        with suppress(Exception):  # the main process finds the reason
            grammar = backend.compile(value)
        _answer(answers, max(_resident() - before, 0))
        del grammar
        _give_memory_back()


def _answer(answers: BinaryIO, number: int) -> None:
    answers.write(number.to_bytes(SIZE, "little"))
    answers.flush()


def _resident() -> int:
    """Return the bytes of memory that this process uses, or 0 if the system does not report them."""
    with suppress(OSError), open("/proc/self/statm") as file:  # Linux has it
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _give_memory_back() -> None:
    """Return freed memory to the system, so that the memory of the next grammar can be measured."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc has it


def _limit_memory(num_bytes: int) -> None:
    """Limit this process to its present memory plus this many bytes."""
    with suppress(OSError), open("/proc/self/statm") as file:  # Linux has it
        limit = int(file.read().split()[0]) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Read a vocabulary and grammars from standard input; write the bytes of each that was compiled or refused."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_compile_all, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
