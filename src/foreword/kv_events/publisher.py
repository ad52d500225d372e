"""Publish cache events over ZMQ, and send past batches again to a reader that missed some.

PUB     topic, 8-byte big-endian sequence number, batch
ROUTER  8-byte start number in; number and batch out for each one kept, at the end number −1 and an empty batch
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread
from types import TracebackType
from typing import Self

import zmq

from foreword.batch import KVGroup
from foreword.errors import ConfigError
from foreword.kv_events.log import CacheLog
from foreword.kv_events.source import EventFormat, KVEventSource
from foreword.kv_events.wire import EventEncoder

END = (-1).to_bytes(8, "big", signed=True)
MOST_EVENTS = 4096  # most events of a batch
POLL_SECONDS = 0.05


class KVEventPublisher:
    """Publish the events of a log in a separate thread, until it is closed.

    groups: the engine's KV groups. endpoint: bound if it contains "*" or "::" or is ipc or inproc, else connected to,
    as in vLLM. replay_endpoint: always bound. topic: such as ``kv@pod@model``. buffer_steps: the number of batches that
    are kept for replay. Raise ConfigError if an endpoint cannot be used.
    """

    def __init__(
        self,
        log: CacheLog,
        groups: Sequence[KVGroup],
        *,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        format: EventFormat = "map",
        rank: int = 0,
        buffer_steps: int = 10_000,
    ) -> None:
        self._log, self._encoder = log, EventEncoder(groups, format, rank)
        self._topic = topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._num_sent = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, endpoint, binds=_is_own(endpoint))
            self._replay = None if replay_endpoint is None else self._socket(zmq.ROUTER, replay_endpoint, binds=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.source = KVEventSource(
            endpoint=_bound(self._pub),
            replay_endpoint=None if self._replay is None else _bound(self._replay),
            topic=topic,
            format=format,
            block_size=self._encoder.block_size,
            data_parallel_rank=rank,
        )
        self._closing = Event()
        self._thread = Thread(target=self._run, name="foreword-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining events of the log, and end. A second call has no effect."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _socket(self, kind: int, endpoint: str, *, binds: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(100_000)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            reason = f"kv_events: {endpoint}: {error}; give an address such as tcp://*:5557"
            raise ConfigError(reason) from None
        return socket

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.is_set()
            while events := self._log.take(MOST_EVENTS, 0 if is_last else POLL_SECONDS):
                batch = self._encoder.encode(events, time.time())
                if batch is not None:
                    self._send(batch)
                self._answer()
            self._answer()
        self._context.destroy(linger=1000)

    def _send(self, batch: bytes) -> None:
        number = self._num_sent.to_bytes(8, "big")
        self._num_sent += 1
        self._sent.append((number, batch))
        self._pub.send_multipart((self._topic, number, batch))

    def _answer(self) -> None:
        """Answer the requests for past batches. A message that is not a request is dropped."""
        while self._replay is not None and self._replay.poll(0):
            reader, *_, start = self._replay.recv_multipart()
            if len(start) == len(END):
                for number, batch in [*self._sent, (END, b"")]:
                    if number >= start:  # END is the largest number
                        self._replay.send_multipart((reader, b"", number, batch))


def _is_own(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _bound(socket: zmq.Socket[bytes]) -> str:
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
