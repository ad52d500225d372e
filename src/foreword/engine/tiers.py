"""Keep blocks of an engine outside of its pool: offer them to tiers, find them for new prompts, and read them back.

    add ──find──▶ some blocks are in a tier ──▶ reader thread ──pieces──▶ between two steps: into free blocks, hittable
                  none ──▶ scheduler                                      all are there ──▶ scheduler

While the blocks of a request are read, it is not in the scheduler, so that no other request waits for it. Blocks that
were read are cached content like any other, which the scheduler finds; nothing else changes for the scheduler.
"""

from __future__ import annotations

import weakref
from _thread import start_new_thread
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from foreword.arrays import I32, I64, U8, Bools
from foreword.batch import KVGroup
from foreword.cache import BlockRemoved, BlockStored, CacheEvent, KVCacheManager
from foreword.cache.keys import adapter_of
from foreword.cache.manager import NamedBlocks
from foreword.cache.prefix import BlockKeys, ExtraKeys, HashFunction, hash_block
from foreword.cache.tiers import BlockFormat, BlockTier, block_name, group_of, part_names
from foreword.errors import ConfigError, EngineError
from foreword.executors import Capability, Executor, TransferExecutor
from foreword.hashes import blake2b
from foreword.scheduler import Request

if TYPE_CHECKING:
    from foreword.batch import CacheChecker  # only for types: few engines load the specification

CONTENT_VERSION = 1
"""Grows with every change after which the same model computes other keys and values, or stores them in another form.
Blocks that were saved with another version are not read.
"""
PIECE_BYTES = 8 << 20
"""Bytes that are copied into the pool between two steps while other requests run, unless one block is larger."""
NUM_PIECES = 3  # number of pieces that are read ahead
IDLE_SECONDS = 0.05  # seconds that a step without work waits for the next piece


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks that are read for a request. names: of their parts, one for a block and several for a state; ends: the
    number of parts up to the end of each block. tiers: the number of the tier of each part. followers: requests that
    need some of the blocks. is_over: whether no further blocks are needed.
    """

    request: Request
    tokens: I32
    blocks: NamedBlocks
    names: Sequence[bytes]
    ends: I64
    tiers: I32
    followers: list[Request] = field(default_factory=list)
    is_over: bool = False


class _Piece(NamedTuple):
    """A piece of a load that was read: the blocks from ``start`` to before ``end``, and the bytes of their parts.
    is_last: whether it is the last piece.
    """

    load: _Load
    start: int
    end: int
    data: U8
    is_last: bool


class Tiers:
    """The tiers of one engine; the first one is searched first. The methods are called in the engine's thread;
    `cache_event` also in the planner's thread, while the engine's thread waits.

    checker: is notified of blocks that are written outside of steps.
    """

    def __init__(
        self, tiers: Sequence[BlockTier], cache: KVCacheManager, executor: Executor, checker: CacheChecker | None
    ) -> None:
        self.members: tuple[BlockTier, ...] = tuple(tiers)
        self._cache, self._executor, self._checker = cache, transfers(executor), checker
        own = self._executor
        self._num_parts = -(-own.state_bytes // own.block_bytes)  # blocks of a tier that a state takes
        self._takes = frozenset(tier.takes for tier in tiers)
        self._names: dict[int, bytes] = {}  # names of whole blocks with cached content
        self._computed: dict[int, bytes] = {}  # names that are not offered yet
        self._passing: dict[int, bytes] = {}  # names that are offered unless a later state replaces theirs
        self._evicted: dict[int, bytes] = {}
        self._loads: dict[str, _Load] = {}  # loads by request id
        self._reading: dict[bytes, _Load] = {}  # by the name of a block
        self._waiting: dict[str, _Load] = {}  # followers, by request id
        self._inbox: SimpleQueue[_Load | None] = SimpleQueue()
        self._outbox: SimpleQueue[_Piece] = SimpleQueue()
        self._credits: SimpleQueue[bool] = SimpleQueue()
        self._has_thread = False
        # This also runs when the engine is garbage-collected, and when the process ends.
        self._stop = weakref.finalize(self, _stop, self._inbox, self._credits, self.members)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def cache_event(self, event: CacheEvent) -> None:
        """Follow the content of the pool."""
        if isinstance(event, BlockStored):
            if len(event.token_ids) == self._cache.tree.block_size:
                self._names[event.block] = name = block_name(event.hash, event.group)
                (self._passing if event.is_passing else self._computed)[event.block] = name
        elif isinstance(event, BlockRemoved):
            removed, passing = self._names.pop(event.block, None), self._passing.pop(event.block, None)
            if removed is not None and not event.is_replaced:
                self._evicted[event.block] = removed
                if passing is not None:
                    self._computed[event.block] = passing
        else:
            self._names.clear()
            self._computed.clear()
            self._passing.clear()
            self._evicted.clear()

    def save(self) -> None:
        """Offer computed and evicted blocks to the tiers. Call it before blocks that were allocated since are
        written.
        """
        if self._computed:
            computed, self._computed = self._computed, {}
            self._offer("computed", computed)
        if self._evicted:
            evicted, self._evicted = self._evicted, {}
            self._offer("evicted", evicted)

    def _save_all(self) -> None:
        """Offer also the states that no later one has replaced so far."""
        self._computed |= self._passing
        self._passing.clear()
        self.save()

    def _offer(self, kind: Literal["computed", "evicted"], named: dict[int, bytes]) -> None:
        if kind not in self._takes:
            return
        blocks = np.fromiter(named, np.int32, len(named))
        for _, own in self._cache.by_pool(blocks):
            if not len(own):
                continue
            names = [self._parts_of(named[block]) for block in own.tolist()]
            for tier in self.members:
                if tier.takes != kind:
                    continue
                wanted = np.flatnonzero(tier.wants([*chain(*names)]).reshape(len(names), -1).any(1))
                if wanted.size:
                    tier.offer([*chain(*(names[i] for i in wanted.tolist()))], self._read(own[wanted]))

    # -- the parts of a state ----------------------------------------------------------------------------------------

    def _parts_of(self, name: bytes) -> list[bytes]:
        """Return the names under which tiers keep a block: its own, or those of the parts of a state."""
        return part_names(name, self._num_parts) if self._cache.is_apart[group_of(name)] else [name]

    def _read(self, blocks: I32) -> U8:
        """Return the bytes of the parts of some blocks, or of some states, uint8 [parts, block_bytes]."""
        data, size = self._executor.read_blocks(blocks), self._executor.block_bytes
        if data.shape[1] % size:
            data = np.pad(data, ((0, 0), (0, -data.shape[1] % size)))
        return data.reshape(-1, size)

    def _write(self, blocks: I32, data: U8) -> None:
        """Copy the bytes of parts into blocks and states."""
        is_state = blocks >= self._cache.pool.num_blocks
        ends = np.cumsum(np.where(is_state, self._num_parts, 1))
        if not is_state.all():
            self._executor.write_blocks(blocks[~is_state], data[ends[~is_state] - 1])
        if is_state.any():
            parts = ends[is_state, None] - self._num_parts + np.arange(self._num_parts)
            states = data[parts].reshape(len(parts), -1)[:, : self._executor.state_bytes]
            self._executor.write_blocks(blocks[is_state], np.ascontiguousarray(states))

    # -- what is read ------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: object) -> bool:
        """Return whether blocks are being read for the request."""
        return request_id in self._loads or request_id in self._waiting

    def take(self, request: Request) -> bool:
        """Begin to read the blocks of a request that is not in the scheduler. Return False if there are no blocks to
        read, or no free blocks for them; the request can then be scheduled.
        """
        if not request.reuse_prefix:
            return False
        where: dict[bytes, int] = {}
        tokens = request.tokens()
        blocks = self._cache.outside(tokens, request.keys, partial(self._find, where))
        if blocks is None or not self._cache.fit(blocks.groups):
            return False
        other = next((self._reading[name] for name in blocks.names if name in self._reading), None)
        if other is not None:
            other.followers.append(request)
            self._waiting[request.request_id] = other
            return True
        # The read blocks replace the least recently used ones, but not the blocks that they continue.
        self._cache.refresh(blocks.held)
        parts = [self._parts_of(name) for name in blocks.names]
        names = [*chain(*parts)]
        tiers = np.array([where[name] for name in names], np.int32)
        load = _Load(request, tokens, blocks, names, np.cumsum([*map(len, parts)]), tiers)
        self._loads[request.request_id] = load
        self._reading.update(dict.fromkeys(blocks.names, load))
        if not self._has_thread:
            self._has_thread = True
            step = max(1, PIECE_BYTES // self._executor.block_bytes)
            queues = self._inbox, self._outbox, self._credits
            start_new_thread(_read_all, (self.members, self._executor.block_bytes, step, *queues))
            for _ in range(NUM_PIECES):
                self._credits.put(True)
        self._inbox.put(load)
        return True

    def ready(self, *, is_idle: bool) -> list[Request]:
        """Copy a piece that was read into the pool, if there is one, and return the requests that can be scheduled now.
        is_idle: whether there is no other work; it then waits a moment for a piece.
        """
        done: list[Request] = []
        if self._loads or not self._outbox.empty():
            with suppress(Empty):
                piece = self._outbox.get(timeout=IDLE_SECONDS) if is_idle else self._outbox.get_nowait()
                self._credits.put(True)
                if not piece.load.is_over:
                    done += self._take_piece(piece)
        return done

    def remove(self, request_id: str) -> list[Request]:
        """Remove a request that ends. Return the requests that waited for its blocks and can be scheduled now."""
        if (other := self._waiting.pop(request_id, None)) is not None:
            other.followers = [one for one in other.followers if one.request_id != request_id]
        load = self._loads.get(request_id)
        return [] if load is None else self._end(load)[1:]

    def clear(self) -> None:
        """Remove every request, after a failure anywhere in a change. Blocks that were read so far stay cached."""
        for load in self._loads.values():
            load.is_over = True
        self._loads, self._reading, self._waiting = {}, {}, {}

    def admitted(self, request: Request) -> None:
        """Count the tokens of a prompt that were read, when its request is admitted for the first time."""
        if (read := request.read_blocks) is not None and request.num_preemptions == 0:
            (before, after), counts = read
            total, left = sum(counts.values()), max(0, min(request.num_cached, after) - before)
            of_tier = {name: left * count // total for name, count in counts.items()}
            name = next(iter(of_tier))
            of_tier[name] += left - sum(of_tier.values())
            request.loaded_tokens = {name: count for name, count in of_tier.items() if count}
            if request.loaded_tokens:
                request.hit_report += "".join(f"; {count} from {name}" for name, count in request.loaded_tokens.items())
            request.read_blocks = None

    def flush(self) -> None:
        """Wait until all blocks that were computed and evicted so far are stored."""
        self._save_all()
        for tier in self.members:
            tier.flush()

    def close(self) -> list[Request]:
        """Store the offered blocks, and end the threads. Closing twice is harmless.

        Return the requests that waited for blocks and can be scheduled. The tiers are not used after this.
        """
        self._save_all()
        self._stop()
        waiting = [one for load in self._loads.values() for one in (load.request, *load.followers)]
        self.clear()
        self.members, self._takes = (), frozenset()
        return waiting

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for blocks."""
        return len(self._loads) + len(self._waiting)

    def content_of(self, tokens: I32, keys: BlockKeys) -> tuple[int, list[bytes], U8]:
        """Return how many of these tokens a later request can reuse, the names of the parts of the blocks that it needs
        for that, and their bytes, uint8 [parts, block_bytes], from the pool and the tiers.
        """
        where: dict[bytes, int] = {}
        found = self._cache.named(tokens, keys, len(tokens), partial(self._find, where))
        parts = [self._parts_of(name) for name in found.names]
        names, data = [*chain(*parts)], []
        for block, own in zip(found.blocks.tolist(), parts, strict=True):
            if block:
                data.append(self._read(np.array([block], np.int32)))
                continue
            data.append(np.empty((len(own), self._executor.block_bytes), np.uint8))
            for i, name in enumerate(own):
                if not self.members[where[name]].read([name], data[-1][i : i + 1]).all():
                    raise EngineError("a block of the conversation has gone since it was found: try again")
        everything = np.concatenate(data) if data else np.empty((0, self._executor.block_bytes), np.uint8)
        return found.num_tokens, names, everything

    def _find(self, where: dict[bytes, int], names: Sequence[bytes]) -> Bools:
        """Return whether all parts of each of these blocks are in tiers; ``where`` gets, of each part, the number of
        the tier that has it.
        """
        parts = [self._parts_of(name) for name in names]
        of_parts = [*chain(*parts)]
        found = np.zeros(len(of_parts), np.bool_)
        for number, tier in enumerate(self.members):
            here = tier.find(of_parts)
            where.update((of_parts[i], number) for i in np.flatnonzero(here & ~found).tolist())
            found |= here
        first = np.cumsum([0, *map(len, parts)])[:-1]
        return np.logical_and.reduceat(found, first) if len(parts) else found

    def _take_piece(self, piece: _Piece) -> list[Request]:
        load, here = piece.load, slice(piece.start, piece.end)
        groups = load.blocks.groups[here]
        fits = self._cache.fit(groups)
        if fits and len(groups):
            blocks = self._cache.take(groups)
            self.save()  # blocks that the allocation evicted
            self._write(blocks, piece.data)
            if self._checker is not None:
                for g in np.unique(groups).tolist():
                    self._checker.bring(blocks[groups == g], g)
            self._cache.bring(load.tokens, load.request.keys, groups, load.blocks.indices[here], blocks)
        return self._end(load) if piece.is_last or not fits else []

    def _end(self, load: _Load) -> list[Request]:
        """End the reads of a request. Return the requests that can be scheduled; followers may have other blocks to
        read.
        """
        load.is_over = True
        del self._loads[load.request.request_id]
        for name in load.blocks.names:
            self._reading.pop(name, None)
        counts = Counter(self.members[number].name for number in load.tiers[load.ends - 1].tolist())
        load.request.read_blocks = (load.blocks.num_held, load.blocks.num_tokens), counts
        for request in load.followers:
            del self._waiting[request.request_id]
        return [load.request, *(request for request in load.followers if not self.take(request))]


def transfers(executor: Executor) -> TransferExecutor:
    """Return the executor. Raise ConfigError if its blocks cannot be kept outside of its pool."""
    if Capability.BLOCK_TRANSFER not in executor.capabilities:
        raise ConfigError(
            f"cache_dir, host_cache_bytes: {type(executor).__name__} does not support blocks of the KV pool kept "
            "outside it (Capability.BLOCK_TRANSFER); leave them out, or use executor='native'"
        )
    return cast(TransferExecutor, executor)


def block_format(executor: Executor, kv_groups: Sequence[KVGroup], model_key: bytes) -> BlockFormat:
    """Return the format of an engine's blocks. Raise ConfigError for an executor whose blocks cannot be kept outside of
    its pool.
    """
    own = transfers(executor)
    version = import_module("foreword").__version__  # imported here because it imports this module indirectly
    parts = (CONTENT_VERSION, version, own.block_layout, own.block_bytes, own.state_bytes, tuple(kv_groups))
    return BlockFormat(own.block_bytes, blake2b(repr(parts).encode(), key=model_key[:64], digest_size=16).digest())


def hash_with_adapters(content_of: Callable[[int], bytes]) -> HashFunction:
    """Return a `hash_block` that uses the content of an adapter's files instead of its number and name, which may
    change with a restart.
    """

    def hashed(parent: bytes, tokens: bytes, extra: ExtraKeys) -> bytes:
        if (adapter := adapter_of(extra)) is not None:
            extra = (("adapter", content_of(adapter[0])), *extra[1:])
        return hash_block(parent, tokens, extra)

    return hashed


def _stop(inbox: SimpleQueue[_Load | None], credits: SimpleQueue[bool], tiers: Sequence[BlockTier]) -> None:
    inbox.put(None)
    credits.put(False)
    for tier in tiers:
        tier.close()


def _read_all(
    tiers: Sequence[BlockTier],
    block_bytes: int,
    step: int,
    inbox: SimpleQueue[_Load | None],
    outbox: SimpleQueue[_Piece],
    credits: SimpleQueue[bool],
) -> None:
    """Read loads in pieces of at most ``step`` parts, but whole blocks, one for each credit."""
    while (load := inbox.get()) is not None:
        start, first, total = 0, 0, len(load.ends)
        while start < total:
            if not credits.get():
                return
            end = max(start + 1, int(np.searchsorted(load.ends, first + step, side="right")))
            data = np.empty((0 if load.is_over else int(load.ends[end - 1]) - first, block_bytes), np.uint8)
            try:
                num_parts = _read(tiers, load, first, data)
            except Exception:
                from logging import getLogger  # here, as in `recorder`: few engines have something to tell

                getLogger("foreword.engine").exception("a tier of the prefix cache failed: its blocks are computed")
                num_parts = 0
            read = int(np.searchsorted(load.ends, first + num_parts, side="right"))
            is_last = end == total or read < end
            whole = int(load.ends[read - 1]) - first if read else 0
            outbox.put(_Piece(load, start, read, data[:whole], is_last))
            if is_last:
                break
            start, first = end, int(load.ends[end - 1])
        del load


def _read(tiers: Sequence[BlockTier], load: _Load, start: int, data: U8) -> int:
    """Read the parts of a load from ``start`` on into data. Return the number of parts before the first missing one."""
    numbers = load.tiers[start : start + len(data)]
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(data)]
    for first, last in pairwise(bounds):
        if first < last:
            there = tiers[int(numbers[first])].read(load.names[start + first : start + last], data[first:last])
            if not there.all():
                return first + int(np.argmin(there))
    return len(data)
