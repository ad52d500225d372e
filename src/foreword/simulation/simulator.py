"""The real scheduler and cache under a recorded load, with a clock instead of a model.

    arrivals ──▶ router ──▶ replicas: scheduler, cache, clock ──ends──▶ router

Time passes in ticks. The router places the arrivals of a tick one by one. It knows its own decisions at once, and
learns the ends of requests one tick later. A replica is only simulated in ticks in which a request comes to it or may
end.

Processes share the replicas among them. Each reads all arrivals and runs the same router; they exchange the numbers of
the requests that ended in each tick, so the result is the same for any number of processes.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from math import inf
from multiprocessing.connection import Connection

import numpy as np

from foreword.errors import ConfigError
from foreword.routing import Placement, make_router
from foreword.simulation.replica import Fleet, Replica
from foreword.simulation.report import SimulationReport
from foreword.simulation.trace import Arrival

Exchange = Callable[[list[int]], list[int]]
"""Takes the requests that ended in this tick in this process; returns those that ended in the last tick in other
processes."""

MAX_PROCESSES = 64


def simulate(arrivals: Iterable[Arrival], fleet: Fleet, *, processes: int = 1) -> SimulationReport:
    """Serve the arrivals, which must be in the order of time, to the end. Memory grows by 12 bytes per request, and
    with the number of requests that wait at the same time.

    processes: if it is above 1, ``arrivals`` is sent to other processes and must be picklable, like `Trace.requests`.
    All requests have the same priority. Steps that only repeat the one before are simulated together, with the same
    result as single steps, except that memory_use is sampled only at their end.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise ConfigError(f"processes={processes}: must be from 1 to {MAX_PROCESSES}")
    processes = min(processes, fleet.num_replicas)
    if processes == 1:
        return _Part(fleet, 0, 1, lambda ended: []).run(arrivals)
    context = multiprocessing.get_context("spawn")
    lines = {(i, j): context.Pipe() for i in range(processes) for j in range(i)}
    ends: list[list[Connection]] = [[] for _ in range(processes)]
    for (i, j), (first, second) in lines.items():
        ends[i].append(first)
        ends[j].append(second)
    results = [context.Pipe(duplex=False) for _ in range(processes - 1)]
    others = [
        context.Process(target=_run_part, args=(arrivals, fleet, i, processes, ends[i], results[i - 1][1]), daemon=True)
        for i in range(1, processes)
    ]
    for other in others:
        other.start()
    for i in range(1, processes):  # so that the loop notices if another process ends
        results[i - 1][1].close()
        for line in ends[i]:
            line.close()
    try:
        with _Lines(ends[0]) as exchange:
            report = _Part(fleet, 0, processes, exchange).run(arrivals)
        for result, _ in results:
            report.add(result.recv())
    except (EOFError, ConnectionError):
        raise ConfigError("a process of the simulation ended early: see its error above, or use one process") from None
    finally:
        for other in others:
            other.terminate()
            other.join()
    return report


def _run_part(
    arrivals: Iterable[Arrival], fleet: Fleet, part: int, num_parts: int, lines: Sequence[Connection], out: Connection
) -> None:
    gc.disable()  # a simulation creates no reference cycles
    with _Lines(lines) as exchange:
        out.send(_Part(fleet, part, num_parts, exchange).run(arrivals))


class _Lines:
    """An `Exchange` with other processes. A thread sends the messages, so no process waits until another one reads."""

    def __init__(self, lines: Sequence[Connection]) -> None:
        self._lines, self._sending, self._num_sent = lines, ThreadPoolExecutor(1), 0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.shutdown()

    def __call__(self, ended: list[int]) -> list[int]:
        data = np.array(ended, np.int64).tobytes()
        for line in self._lines:
            self._sending.submit(line.send_bytes, data)
        self._num_sent += 1
        if self._num_sent == 1:
            return []
        return [index for line in self._lines for index in np.frombuffer(line.recv_bytes(), np.int64).tolist()]


class _Part:
    """Every num_parts-th replica, from the one with number ``part`` on."""

    def __init__(self, fleet: Fleet, part: int, num_parts: int, exchange: Exchange) -> None:
        self._fleet, self._part, self._num_parts, self._exchange = fleet, part, num_parts, exchange
        self._report = SimulationReport(num_replicas=fleet.num_replicas)
        self._router = make_router(fleet.router, fleet.num_replicas)
        self._replicas: dict[int, Replica] = {}  # replicas are created with their first request
        self._due: list[tuple[float, int]] = []  # a heap of the times at which a replica has to be simulated
        self._due_at: dict[int, float] = {}  # the valid time of each replica; other entries of the heap are stale
        self._placed: dict[int, Placement] = {}  # the requests in progress, as far as the router knows

    def run(self, arrivals: Iterable[Arrival]) -> SimulationReport:
        ended_before: list[int] = []
        for until, arrived in self._ticks(arrivals):
            for index, arrival in arrived:
                self._place(index, arrival)
            ended = self._advance(until)
            for index in (*ended_before, *self._exchange(ended)):
                self._router.ended(self._placed.pop(index))
            ended_before = ended
        self._advance(inf)
        report, replicas = self._report, self._replicas.values()
        report.seconds = max((r.now for r in replicas), default=0.0)
        report.busy = [r.busy for r in replicas]
        report.num_leaked_blocks = sum(r.cache.pool.num_used for r in replicas)
        return report

    def _ticks(self, arrivals: Iterable[Arrival]) -> Iterator[tuple[float, list[tuple[int, Arrival]]]]:
        """Yield the end of each tick and its arrivals. A pause without arrivals is one long tick, and then one normal
        tick.
        """
        tick, until = self._fleet.tick, 0.0
        found: list[tuple[int, Arrival]] = []
        for index, arrival in enumerate(arrivals):
            while arrival.time >= until:
                yield until, found
                found, begin = [], arrival.time // tick * tick
                until = max(until + tick, begin - tick if self._placed else begin + tick)
            found.append((index, arrival))
        yield until, found

    def _place(self, index: int, arrival: Arrival) -> None:
        size = self._fleet.hashed_tokens
        ids = arrival.hash_ids[: -(-arrival.input_length // size)]  # further ids are those of the answer
        placement = self._placed[index] = self._router.choose(arrival.input_length, ids, size)
        number = placement.replica
        if number % self._num_parts != self._part:
            return
        replica = self._replicas.get(number)
        if replica is None:
            replica = self._replicas[number] = Replica(self._fleet, self._report)
        replica.submit(index, arrival)
        self._look_at(number, arrival.time)

    def _advance(self, until: float) -> list[int]:
        """Return the requests that end in the tick."""
        due, ended = self._due, list[int]()
        while due and due[0][0] < until:
            moment, number = heappop(due)
            if self._due_at.get(number) != moment:
                continue
            del self._due_at[number]
            replica = self._replicas[number]
            following = replica.advance(until)
            if following < inf:
                self._look_at(number, max(following, until))
            ended += replica.ended
            replica.ended.clear()
        return ended

    def _look_at(self, number: int, moment: float) -> None:
        if moment < self._due_at.get(number, inf):
            self._due_at[number] = moment
            heappush(self._due, (moment, number))
