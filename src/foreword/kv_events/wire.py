"""Encode cache events in the format of vLLM's ``kv_events``: batches in msgpack.

    [seconds since 1970, [event, …], data-parallel rank]

Each event is a map with its ``type``, or an array that begins with the type, as readers of older versions expect.
Optional fields that are null are left out of maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from foreword.batch import KVGroup
from foreword.cache import BlockRemoved, BlockStored, CacheEvent
from foreword.cache.prefix import ROOT_HASH
from foreword.errors import ConfigError
from foreword.kv_events.source import EventFormat

MEDIUM = "CPU"


class EventEncoder:
    """Encode the events of one engine. It must get all events, in order.

    groups: the engine's KV groups. Raise ConfigError if their block sizes differ.

    Blocks are named by 64 bits of their hash. Adjacent blocks of a sequence are one event. If several blocks have the
    same content, it is stored with the first of them and removed with the last. Partial blocks are not published.
    """

    def __init__(self, groups: Sequence[KVGroup], format: EventFormat = "map", rank: int = 0) -> None:
        sizes = {group.block_size for group in groups}
        if len(sizes) != 1:
            raise ConfigError(
                f"kv_events: the model's KV groups have blocks of {sorted(sizes)} tokens; one size is needed"
            )
        (self.block_size,) = sizes
        self.format, self._rank = format, rank
        self._groups = groups
        self._num_holders: Counter[tuple[int, bytes]] = Counter()  # blocks per group and hash
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, events: Iterable[CacheEvent], time: float) -> bytes | None:
        """Return a batch, or None if the events change nothing. time: seconds since 1970."""
        made = [self._made(event) for event in self._merged(events)]
        return self._encode([time, made, self._rank]) if made else None

    def _merged(self, events: Iterable[CacheEvent]) -> list[list[CacheEvent]]:
        """Yield runs of events that change the published content; each run becomes one event."""
        runs: list[list[CacheEvent]] = []
        for event in events:
            if not self._is_news(event):
                continue
            last = runs[-1][-1] if runs else None
            if isinstance(event, BlockStored) and isinstance(last, BlockStored):
                is_next = last.group == event.group and event.parent_hash == last.hash and not event.extra_keys
            else:
                is_next = isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved)
                is_next = is_next and last.group == event.group  # type: ignore[union-attr]
            if is_next:
                runs[-1].append(event)
            else:
                runs.append([event])
        return runs

    def _is_news(self, event: CacheEvent) -> bool:
        if isinstance(event, BlockStored):
            if len(event.token_ids) < self.block_size:
                return False
            key = event.group, event.hash
            self._num_holders[key] += 1
            return self._num_holders[key] == 1
        if isinstance(event, BlockRemoved):
            key = event.group, event.hash
            if key not in self._num_holders:  # a partial block
                return False
            self._num_holders[key] -= 1
            if self._num_holders[key]:
                return False
            del self._num_holders[key]
            return True
        self._num_holders.clear()
        return True

    def _made(self, run: Sequence[CacheEvent]) -> object:
        first = run[0]
        if isinstance(first, BlockStored):
            return self._form(*self._stored(first, [event for event in run if isinstance(event, BlockStored)]))
        if isinstance(first, BlockRemoved):
            hashes = [_name(event.hash) for event in run if isinstance(event, BlockRemoved)]
            return self._form("BlockRemoved", {"block_hashes": hashes, "medium": MEDIUM}, {"group_idx": first.group})
        return self._form("AllBlocksCleared", {}, {})

    def _stored(self, first: BlockStored, run: Sequence[BlockStored]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        group = self._groups[first.group]
        kind = "mamba" if group.recurrent else "sliding_window" if group.sliding_window else "full_attention"
        lora_id, lora_name = first.adapter or (None, None)
        keys = [tuple(_extra_keys(event)) or None for event in run]
        required = {
            "block_hashes": [_name(event.hash) for event in run],
            "parent_block_hash": None if first.parent_hash == ROOT_HASH else _name(first.parent_hash),
            "token_ids": [token for event in run for token in event.token_ids],
            "block_size": self.block_size,
            "lora_id": lora_id,
            "medium": MEDIUM,
            "lora_name": lora_name,
        }
        optional = {
            "extra_keys": keys if any(keys) else None,
            "group_idx": first.group,
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": group.sliding_window,
        }
        return "BlockStored", required, optional

    def _form(self, kind: str, required: dict[str, Any], optional: dict[str, Any]) -> object:
        if self.format == "map":
            return {"type": kind, **required, **{name: value for name, value in optional.items() if value is not None}}
        return [kind, *required.values(), *optional.values()]


def _name(hash: bytes) -> int:
    """Return 64 bits of a hash, as vLLM takes them."""
    return int.from_bytes(hash[-8:], "big")


def _extra_keys(event: BlockStored) -> Iterator[object]:
    """Return the extra keys of a block as vLLM has them: the adapter's name in every block, and others, such as
    ("salt", "x") or ("image", hash, offset), without their kind.
    """
    if event.adapter is not None:
        yield event.adapter[1]
    key: Any
    for key in event.extra_keys:
        if key[0] != "adapter":
            yield key[1] if len(key) == 2 else key[1:]
