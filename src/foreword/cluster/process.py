"""A replica as a separate process, which ends when the process that started it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from foreword.cluster.client import ReplicaLostError, request
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError, ForewordError
from foreword.server.config import ServerConfig
from foreword.server.replicas import CALL_SECONDS
from foreword.server.run import run

PROBE_SECONDS = 5.0


class ReplicaProcess:
    """A process that serves the model on a port of this machine, with a key that only this object knows.

    number: its number among the replicas. num_requests: the requests that the cluster has sent and that have not ended.
    identity: version, names of the model and max_model_len, when it is ready.
    """

    def __init__(self, model: str, config: ServerConfig, options: LLMOptions, number: int) -> None:
        self.key, self.port, self.num_requests = secrets.token_hex(16), 0, 0
        self.identity: tuple[object, ...] = ()
        inner = config.behind_front(
            host="127.0.0.1",
            port=0,
            replicas=1,
            served_model_name=config.served_model_name or (model,),
            api_key=(self.key,),
            allowed_host=(),
            admin_key=self.key,
            tls_certificate=None,
            tls_key=None,
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(model, inner, number, options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    async def ready(self) -> None:
        """Wait until it serves. Raise a ConfigError with the reason if it cannot."""
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), is_readable.set)
        try:
            await is_readable.wait()
        finally:
            loop.remove_reader(self._pipe.fileno())
        try:
            is_ready, text = self._pipe.recv()
        except (EOFError, OSError):
            raise ConfigError("a replica ended before it was ready: see its error above") from None
        if not is_ready:
            raise ConfigError(text)
        self.port = urlsplit(text).port or 0
        version, models = await self.get("/version"), await self.get("/v1/models")
        base = [m for m in models["data"] if m["parent"] is None]
        self.identity = (version["version"], *(m["id"] for m in base), base[0]["max_model_len"])

    async def call(
        self, method: str, path: str, body: object = None, *, seconds: float = CALL_SECONDS
    ) -> tuple[int, Any]:
        """Send a short request. Return status and JSON value; raise ReplicaLostError if there is no answer in time."""
        status, answer = await self.fetch(method, path, body, seconds=seconds)
        return status, msgspec.json.decode(answer)

    async def fetch(
        self, method: str, path: str, body: object = None, *, seconds: float = CALL_SECONDS
    ) -> tuple[int, bytes]:
        """Send a short request. Return status and content of the answer, with the errors of `call`."""
        headers = [(b"authorization", b"Bearer " + self.key.encode()), (b"content-type", b"application/json")]
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(seconds),
                request(self.port, method, quote(path).encode(), headers, data) as response,
            ):
                return response.status, await response.body()
        except TimeoutError:
            raise ReplicaLostError(f"no answer within {seconds} s") from None

    async def get(self, path: str) -> Any:
        return (await self.call("GET", path))[1]

    async def is_well(self) -> bool:
        """Return whether it answers in time."""
        try:
            return (await self.call("GET", "/ready", seconds=PROBE_SECONDS))[0] == 200
        except ReplicaLostError:
            return False

    async def end(self, timeout: float, *, kill: bool = False) -> None:
        """End the process. Requests in progress are finished within the time, unless it is killed."""
        (self.process.kill if kill else self.process.terminate)()
        await asyncio.to_thread(self.process.join, timeout + 5.0)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join)
        self._pipe.close()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self.process.sentinel)


def _serve(model: str, config: ServerConfig, number: int, options: LLMOptions, pipe: Connection) -> None:
    """Run the server; this is the main function of the process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the first process ends the others
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def end_with_parent() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        run(model, config, on_ready=lambda url: pipe.send((True, url)), rank=number, **options)
    except (ForewordError, OSError) as error:
        pipe.send((False, str(error)))
