"""`foreword batch --ray`: answer the lines of a file with replicas that are Ray actors.

A limited number of lines is processed at a time, so the file is read as fast as it is answered. If a replica ends,
another one processes its lines again. A line that ends several replicas gets an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Lock
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from foreword import __version__
from foreword.engine.options import LLMOptions, with_threads
from foreword.errors import ConfigError, EngineError, ForewordError
from foreword.openai.batch_file import BatchLine, Record
from foreword.ray.answerer import Answerer
from foreword.ray.version import check_version

CHUNKS = 6  # chunks in progress on a replica, each with a quarter of the requests that it computes at the same time
MOST_ENDS = 2  # ends of replicas with only this line, after which the line is an error
MOST_IDLE_ENDS = 16  # successive ends of replicas without a result between them


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster, or start one here. Raise ConfigError if there is none at the address."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray at {address!r:.80}: cannot be used ({error})") from None
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(slots=True, eq=False)
class _Chunk:
    """Lines for a replica. is_alone: whether they must be processed alone, because a replica with them ended. num_ends:
    number of replicas that ended while they processed only this chunk.
    """

    lines: list[BatchLine]
    is_alone: bool = False
    num_ends: int = 0


class _Replica:
    """The actor. The first call makes its engine, so that an error of the model is reported unchanged."""

    def __init__(self, names: Sequence[str], options: LLMOptions, version: str) -> None:
        self._arguments, self._version, self._making = (names, options), version, Lock()
        self._answerer: Answerer | None = None

    def capacity(self) -> int:
        """Return the number of requests that it computes at the same time."""
        return self._made().max_num_seqs

    def answer(self, lines: Sequence[BatchLine]) -> list[Record]:
        return self._made().answer(lines)

    def _made(self) -> Answerer:
        check_version(self._version)
        with self._making:
            self._answerer = self._answerer or Answerer(*self._arguments)
            return self._answerer


class RayBatch:
    """Answers lines with replicas. names: as in `Batch`. options: those of `LLM`; num_threads is the number of Ray's
    CPUs that a replica uses, by default an equal share. ordered: whether results have the order of the input.
    """

    def __init__(self, names: Sequence[str], num_replicas: int, options: LLMOptions, *, ordered: bool = False) -> None:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        threads = int(options.get("num_threads") or max(cpus // num_replicas, 1))
        if threads * num_replicas > cpus:
            raise ConfigError(
                f"--replicas={num_replicas} of {threads} threads: Ray has {cpus} CPUs; use fewer of either"
            )
        self._arguments = list(names), with_threads(options, threads), __version__
        self._kind = ray.remote(_Replica).options(num_cpus=threads, max_concurrency=CHUNKS, max_restarts=0)
        self._replicas = [self._kind.remote(*self._arguments) for _ in range(num_replicas)]
        self._ordered = ordered
        self._again: deque[_Chunk] = deque()
        self._running: dict[ray.ObjectRef[Any], tuple[int, _Chunk]] = {}
        self._open: dict[int, Record | None] = {}
        self._num_idle_ends = 0

    def run(self, lines: Iterator[BatchLine]) -> Iterator[Record]:
        """Yield the results. Raise EngineError if Ray or the engines fail; results that were yielded stay valid."""
        try:
            (capacity, *_) = ray.get([replica.capacity.remote() for replica in self._replicas])
            yield from self._run(lines, max(capacity // 4, 1))
        except RayTaskError as error:
            raise _cause(error) from None
        except (ObjectStoreFullError, OutOfDiskError):
            raise EngineError(
                "Ray's object store is full, and so is the disk that it may spill to: free them, or start Ray with "
                "more --object-store-memory; the same command continues"
            ) from None
        except (RayError, ConnectionError) as error:
            raise EngineError(f"Ray is lost ({type(error).__name__}): the same command continues") from None

    def _run(self, lines: Iterator[BatchLine], size: int) -> Iterator[Record]:
        limit = 2 * CHUNKS * size * len(self._replicas)
        exhausted = False
        while True:
            while (number := self._free_replica(alone=bool(self._again))) is not None:
                if self._again:
                    chunk = self._again.popleft()
                elif exhausted or len(self._open) >= limit:
                    break
                else:
                    chunk = _Chunk(list(islice(lines, size)))
                    exhausted = not chunk.lines
                    if exhausted:
                        break
                    self._open.update((line.number, None) for line in chunk.lines)
                self._running[self._replicas[number].answer.remote(chunk.lines)] = number, chunk
            if not self._running:
                return
            (done, *_), _ = ray.wait(list(self._running))
            yield from self._finish(self._received(done))

    def _free_replica(self, *, alone: bool) -> int | None:
        """Return the replica with the fewest chunks, if it may get one more. alone: only a replica without chunks."""
        counts = [0] * len(self._replicas)
        for number, chunk in self._running.values():
            counts[number] += CHUNKS if chunk.is_alone else 1
        least = min(counts)
        return counts.index(least) if least < (1 if alone else CHUNKS) else None

    def _received(self, done: Any) -> list[tuple[BatchLine, Record]]:
        number, chunk = self._running.pop(done)
        try:
            records = ray.get(done)
        except RayActorError:
            return self._lost(number, chunk)
        self._num_idle_ends = 0
        return list(zip(chunk.lines, records, strict=True))

    def _lost(self, number: int, chunk: _Chunk) -> list[tuple[BatchLine, Record]]:
        """Replace a replica that ended. Its chunks are processed again, each alone. A chunk that was processed alone is
        divided in half, until the line that ends replicas is found.
        """
        self._num_idle_ends += 1
        if self._num_idle_ends > MOST_IDLE_ENDS:
            raise EngineError("replicas end again and again: see Ray's logs; the same command continues")
        lost = [chunk, *(other for at, other in self._running.values() if at == number)]
        self._running = {ref: known for ref, known in self._running.items() if known[0] != number}
        self._replicas[number] = self._kind.remote(*self._arguments)
        if not chunk.is_alone:
            self._again += (_Chunk(each.lines, is_alone=True) for each in lost)
        elif half := len(chunk.lines) // 2:
            self._again += (_Chunk(part, is_alone=True) for part in (chunk.lines[:half], chunk.lines[half:]))
        elif chunk.num_ends + 1 < MOST_ENDS:
            self._again.append(_Chunk(chunk.lines, True, chunk.num_ends + 1))
        else:
            (line,) = chunk.lines
            message = f"line {line.number}: {MOST_ENDS} replicas that had it alone ended"
            return [(line, line.record(None, {"code": "replica_lost", "message": message}))]
        return []

    def _finish(self, found: list[tuple[BatchLine, Record]]) -> Iterator[Record]:
        """Return the results that can be reported, now that these are known."""
        for line, record in found:
            self._open[line.number] = record
        numbers = list(self._open) if self._ordered else [line.number for line, _ in found]
        for number in takewhile(lambda n: self._open[n] is not None, numbers):
            record_of = self._open.pop(number)
            assert record_of is not None
            yield record_of


def _cause(error: RayTaskError) -> Exception:
    """Return the exception that a replica raised."""
    cause = error.cause
    return cause if isinstance(cause, ForewordError) else EngineError(f"a replica failed: {cause!r:.500}")
