"""The replicas of a model: start, watch and restart them, and replace them one after the other."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from foreword.cluster.client import ReplicaLostError
from foreword.cluster.process import ReplicaProcess
from foreword.engine.options import LLMOptions, of_process, with_threads
from foreword.errors import ConfigError
from foreword.machine import VARIABLE, default_threads
from foreword.routing import make_router
from foreword.server.adapter_routes import LOAD
from foreword.server.config import ServerConfig

PROBE_INTERVAL = 5.0
PROBES = 3  # after this many failed probes in a row, the replica is killed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a restart
MIN_POLL = 0.02


class Cluster:
    """N replicas, numbered from 0, and the router that chooses among the ready ones.

    adapters: the bodies of requests that loaded LoRA adapters, by name; a new process gets them before other requests.
    """

    def __init__(self, model: str, config: ServerConfig, options: LLMOptions) -> None:
        configs = config.of_replicas()
        if not os.environ.get(VARIABLE):
            options = with_threads(options, max(default_threads() // config.replicas, 1))
        self._make: Callable[[int], ReplicaProcess] = lambda number: ReplicaProcess(
            model, configs[number], of_process(options, number), number
        )
        self._has_addresses = config.kv_events is not None  # only one process at a time can bind them
        self._drain_timeout = config.drain_timeout
        self.router = make_router(config.router, config.replicas)
        self.replicas: list[ReplicaProcess | None] = [None] * config.replicas
        self.restarts = [0] * config.replicas
        self.adapters: dict[str, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing = asyncio.Lock()
        self._identity: tuple[object, ...] = ()
        for number in range(config.replicas):
            self.router.close(number)

    @property
    def ready(self) -> list[tuple[int, ReplicaProcess]]:
        """Return numbers and processes of the replicas that accept requests."""
        return [(n, r) for n, r in enumerate(self.replicas) if r is not None and self.router.is_open(n)]

    async def start(self) -> None:
        """Start all replicas and wait until they are ready. If one cannot be started, end all and raise ConfigError."""
        started = [self._make(number) for number in range(len(self.replicas))]
        try:
            await asyncio.gather(*(process.ready() for process in started))
            for number, process in enumerate(started):
                await self._admit(number, process)
        except BaseException:
            for task in self._tasks:
                task.cancel()
            for process in started:
                process.process.kill()
            raise

    async def close(self) -> None:
        """End all replicas."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(r.end(self._drain_timeout) for r in self.replicas if r is not None))

    @asynccontextmanager
    async def chosen(
        self, num_tokens: int, pieces: Sequence[int], piece_size: int, avoid: set[int]
    ) -> AsyncGenerator[tuple[int, ReplicaProcess], None]:
        """Choose the replica of a request, which counts as in progress within the block. Raise CapacityError if none is
        ready.
        """
        placement = self.router.choose(num_tokens, pieces, piece_size, avoid)
        process = self.replicas[placement.replica]
        assert process is not None
        process.num_requests += 1
        try:
            yield placement.replica, process
        finally:
            process.num_requests -= 1
            self.router.ended(placement)

    def replace_all(self) -> None:
        """Replace the replicas with new processes, one after the other, while they serve."""
        self._spawn(self._replace_all())

    async def _replace_all(self) -> None:
        async with self._replacing:
            _note("replacing the replicas")
            self._identity = ()
            for number in range(len(self.replicas)):
                before = self.replicas[number]
                if self._has_addresses and before is not None:
                    self._close(number)
                    await self._drain(before)
                process = self._make(number)
                try:
                    await process.ready()
                    before = self.replicas[number]
                    await self._admit(number, process)
                except (ConfigError, ReplicaLostError) as error:
                    await process.end(0.0, kill=True)
                    before = next((r for r in self.replicas if r is not None), None)
                    self._identity = () if before is None else before.identity
                    _note(f"replica {number} was not replaced, nor those after it: {error}")
                    if self._has_addresses:
                        self._spawn(self._start_again(number))
                    return
                if before is not None:
                    await self._drain(before)
            _note("all replicas were replaced")

    async def _drain(self, process: ReplicaProcess) -> None:
        """End a process, which gets no more requests, when its last request has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                while process.num_requests:
                    await asyncio.sleep(MIN_POLL)
        await process.end(self._drain_timeout)

    async def _admit(self, number: int, process: ReplicaProcess) -> None:
        """Let a process that is ready accept requests. Raise ConfigError if it differs from the others."""
        if self._identity and process.identity != self._identity:
            raise ConfigError(
                f"replica {number} is version, model, max_model_len = {process.identity}, the others are "
                f"{self._identity}: send SIGHUP to replace all"
            )
        for name, body in self.adapters.items():
            status, answer = await process.call(LOAD.method, LOAD.path, body, seconds=LOAD.replica_seconds)
            if status != 200:
                raise ConfigError(f"replica {number}: adapter {name!r:.80}: {answer['error']['message']}")
        self._identity = process.identity
        self.replicas[number] = process
        self.router.open(number)
        self._spawn(self._watch(number, process))

    async def _watch(self, number: int, process: ReplicaProcess) -> None:
        """Kill a process that does not answer, and start a new one when a process has ended."""
        probing = asyncio.create_task(self._probe(number, process))
        try:
            await process.ended()
        finally:
            probing.cancel()
        if self.replicas[number] is not process:  # replaced
            return
        self._close(number)
        _note(f"replica {number} ended (status {process.process.exitcode}); it is started again")
        await self._start_again(number)

    async def _probe(self, number: int, process: ReplicaProcess) -> None:
        """Probe a process regularly. It gets no requests while it does not answer, and is killed after several failed
        probes.
        """
        failed = 0
        while failed < PROBES:
            await asyncio.sleep(PROBE_INTERVAL)
            failed = 0 if await process.is_well() else failed + 1
            if self.replicas[number] is not process:
                continue
            if failed:
                self.router.close(number)
            elif not self.router.is_open(number):
                self.router.open(number, is_empty=False)
        process.process.kill()

    def _close(self, number: int) -> None:
        self.router.close(number)
        self.replicas[number] = None

    async def _start_again(self, number: int) -> None:
        pause = FIRST_PAUSE
        while self.replicas[number] is None:
            self.restarts[number] += 1
            process = self._make(number)
            try:
                await process.ready()
                if self.replicas[number] is not None:  # all replicas were replaced meanwhile
                    await process.end(0.0, kill=True)
                    return
                await self._admit(number, process)
            except (ConfigError, ReplicaLostError) as error:
                _note(f"replica {number}: {error}")
                await process.end(0.0, kill=True)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except asyncio.CancelledError:
                process.process.kill()
                raise

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _note(text: str) -> None:
    print(f"foreword: {text}", file=sys.stderr, flush=True)
