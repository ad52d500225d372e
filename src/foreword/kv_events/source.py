"""Where events are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventFormat = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """Where a reader connects: endpoints as ZMQ bound them, None without replay."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    format: EventFormat
    block_size: int
    data_parallel_rank: int
