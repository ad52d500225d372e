"""The addresses where events are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreword.errors import ConfigError

HIGHEST_PORT = 65535

EventFormat = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """The addresses to which a reader connects: the endpoints that ZMQ bound. The replay endpoint is None if there is
    no replay.
    """

    endpoint: str
    replay_endpoint: str | None
    topic: str
    format: EventFormat
    block_size: int
    data_parallel_rank: int


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of one of several engines, as for vLLM's data-parallel ranks: the rank is added to the port,
    or to the name for ipc and inproc. A port that ZMQ chooses is not changed. Raise ConfigError for a port above 65535.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if port in ("*", "0") or not port.isdecimal():  # ZMQ refuses an invalid port
        return endpoint
    if int(port) + rank > HIGHEST_PORT:
        raise ConfigError(f"kv_events: {endpoint:.80}: replica {rank} needs port {int(port) + rank}; use a lower one")
    return f"{host}:{int(port) + rank}"
