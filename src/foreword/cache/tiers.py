"""Places outside the pool where the content of blocks is kept: their interface, and the one in host memory.

        computed ──offer──▶ tier         a block whose content a lookup can find from now on
        evicted  ──offer──▶ tier         a block that the pool is about to give to another request
        prompt   ──find───▶ which of its blocks are there ──read──▶ bytes for blocks of the pool

A block has a name: equal names mean equal content, in every process that uses a tier. A name depends on the tokens up
to the end of the block, on their extra keys (adapter, images, salt), and on the KV group: see `block_name`. The state
of recurrent layers, which has a size of its own, is kept as several blocks: see `part_names`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from foreword.arrays import U8, Bools
from foreword.errors import ConfigError
from foreword.hashes import blake2b

NAME_BYTES = 18
QUEUE_BYTES = 256 << 20
"""The largest number of bytes of blocks that wait to be written to a disk; further blocks are not saved."""


def block_name(content: bytes, group: int) -> bytes:
    """Return the name of a block: the hash of its content (`hash_block`, 16 bytes), and its KV group (2 bytes)."""
    return content + group.to_bytes(2, "little")


def group_of(name: bytes) -> int:
    """Return the KV group of a block with this name."""
    return int.from_bytes(name[-2:], "little")


def part_names(name: bytes, count: int) -> list[bytes]:
    """Return the names of the ``count`` parts of a state: a tier keeps it as blocks of the size of all others."""
    group = name[-2:]
    return [blake2b(name, digest_size=16, salt=part.to_bytes(4, "little")).digest() + group for part in range(count)]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The format of an engine's blocks. block_bytes: the size of one block. key: 16 bytes; equal keys mean that another
    process can use the bytes: the same model, formats, sizes of blocks, and version of Foreword.
    """

    block_bytes: int
    key: bytes


@runtime_checkable
class BlockTier(Protocol):
    """A place that keeps the content of blocks.

    name: for counts and messages, such as "disk". takes: the blocks that it is offered: "computed" ones as soon as they
    can be hit, or "evicted" ones before the pool overwrites them.

    `read` is called in a separate thread, the others in the engine's thread between two steps, where they must not wait
    for a device or a network. A tier that fails returns no blocks and raises nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def takes(self) -> Literal["computed", "evicted"]: ...

    def find(self, names: Sequence[bytes]) -> Bools:
        """Return whether each of these blocks is there, bool [len(names)]."""

    def read(self, names: Sequence[bytes], data: U8) -> Bools:
        """Write the bytes of block names[i] to data[i], uint8 [block_bytes]. Return for each block whether that was
        done. It is not done for a block that was removed after it was found, or whose bytes are damaged.
        """

    def wants(self, names: Sequence[bytes]) -> Bools:
        """Return which of these blocks the tier takes if offered now: those that it lacks, while it has room."""

    def offer(self, names: Sequence[bytes], data: U8) -> None:
        """Keep blocks that the tier wants. data: uint8 [len(names), block_bytes], which does not change afterwards."""

    def flush(self) -> None:
        """Wait until the offered blocks are kept. Any thread may call it."""

    def close(self) -> None:
        """Keep the offered blocks, and free the tier's resources. Closing twice is harmless."""


TierFactory = Callable[[BlockFormat], BlockTier]
"""A function that makes a tier for the blocks of an engine."""


class HostTier:
    """A `BlockTier` in host memory, which takes the blocks that the pool evicts. The least recently used blocks make
    room for new ones.

    capacity: bytes of blocks. Raise ConfigError if it is less than one block.
    """

    name = "host"
    takes: Literal["computed", "evicted"] = "evicted"

    def __init__(self, blocks: BlockFormat, *, capacity: int) -> None:
        count = capacity // blocks.block_bytes
        if count < 1:
            raise ConfigError(
                f"host_cache_bytes={capacity}: a block has {blocks.block_bytes} bytes; give at least that many"
            )
        self._memory: U8 = np.empty((count, blocks.block_bytes), np.uint8)
        self._free = list(range(count - 1, -1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of blocks that it holds."""
        return len(self._places)

    def find(self, names: Sequence[bytes]) -> Bools:
        with self._lock:
            return np.fromiter((name in self._places for name in names), np.bool_, len(names))

    def read(self, names: Sequence[bytes], data: U8) -> Bools:
        done = np.zeros(len(names), np.bool_)
        for i, name in enumerate(names):
            with self._lock:
                if (place := self._places.get(name)) is not None:
                    self._places.move_to_end(name)
                    data[i] = self._memory[place]
                    done[i] = True
        return done

    def wants(self, names: Sequence[bytes]) -> Bools:
        return ~self.find(names)

    def offer(self, names: Sequence[bytes], data: U8) -> None:
        with self._lock:
            for name, block in zip(names, data, strict=True):
                if name not in self._places:
                    place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
                    self._memory[place] = block
                    self._places[name] = place

    def flush(self) -> None:
        """Do nothing, because blocks are not written later."""

    def close(self) -> None:
        with self._lock:
            self._places.clear()
            self._free = list(range(len(self._memory) - 1, -1, -1))
