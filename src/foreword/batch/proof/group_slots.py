"""The slots of one KV group: how an engine uses its blocks, and what each slot holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64, U64, AnyArray, Bools, Ints
from foreword.batch.state.block_table import BlockTable
from foreword.batch.step.layout import PAD_SLOT_ID
from foreword.batch.step.slots import ragged_arange, slots
from foreword.batch.step.tensors import BatchTensors
from foreword.errors import ConfigError
from foreword.integers import INT32_MAX, is_int32

NEVER, ANY = np.uint64(0), np.uint64(1)
"""The content of a slot that was never written, and a content that equals every content."""
VERSION_BITS = 32
MOST_SPARE = 1 << 16  # blocks beyond those used, where their number is not known


@dataclass(frozen=True, slots=True)
class GroupUse:
    """The use of a KV group's blocks by an engine, where its `KVGroup` does not define it.

    slots: False if no token has a slot, as with states at block borders and keys of an encoder.
    chunk: C, a query at position p sees the keys of positions p // C · C … p alone; None: as the `KVGroup` says.
    ring: W, the key of position p is at index p mod W of the request's first ceil(W / S) blocks, a step reads the keys
        before it from there, and writes its own afterwards, at most the last W. None: it is at index p.
    """

    slots: bool = True
    chunk: int | None = None
    ring: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("chunk", self.chunk), ("ring", self.ring)):
            if value is not None and not is_int32(value, 1):
                raise ConfigError(f"GroupUse({name}={value!r}): must be 1 or more, or None")
        if self.ring is not None and self.chunk is not None:
            raise ConfigError("GroupUse: a ring has no chunks; give one of them")

    def lowest(self, table: BlockTable, computed: I32) -> I64:
        """Return the lowest position that a step's first token sees, [B], after c computed tokens."""
        c = computed.astype(np.int64)
        if self.chunk is not None:
            return c // self.chunk * self.chunk
        window = table.group.sliding_window if self.ring is None else self.ring
        lowest: I64 = np.zeros_like(c) if window is None else np.maximum(c - window + 1, 0)
        return lowest

    def slots_of(self, batch: BatchTensors, group: int) -> I64:
        """Return the slot of each token's key in the blocks of its request, [T]; −1 where no token has a slot."""
        T, table = batch.num_tokens, batch.states.block_tables[group]
        if not self.slots:
            return np.full(T, PAD_SLOT_ID, np.int64)
        if self.ring is None:
            return batch.slot_mapping[group][:T]
        positions, owner = batch.positions[:T], batch.req_indices
        written = positions >= batch.seq_lens[owner] - self.ring  # the others would be written over in the same step
        return np.where(written, self.slots_at(table, batch.idx_mapping[owner], positions), PAD_SLOT_ID)

    def slots_at(self, table: BlockTable, rows: Ints, positions: I64) -> I64:
        """Return the slots of these positions of the requests in these rows, [n]."""
        return slots(table, rows, positions if self.ring is None else positions % self.ring)

    def read_slots_of(self, batch: BatchTensors, group: int) -> tuple[I64, I64]:
        """Return (requests of the batch, slots) of every key that a step reads, from the lowest position that a
        request's first token sees; −1 for a key that is not read from the cache, since a ring is read before it is
        written.
        """
        table, B = batch.states.block_tables[group], batch.num_reqs
        lowest = self.lowest(table, batch.num_computed_tokens)
        counts = batch.seq_lens[:B] - lowest
        owner = np.repeat(np.arange(B), counts)
        positions = np.repeat(lowest, counts) + ragged_arange(counts)
        read = self.slots_at(table, batch.idx_mapping[owner], positions)
        return owner, read if self.ring is None else np.where(
            positions < batch.num_computed_tokens[owner], read, PAD_SLOT_ID
        )


class GroupSlots:
    """The slots of one KV group. The last block is not a block of the cache, and it has no content."""

    def __init__(
        self, index: int, table: BlockTable, use: GroupUse, num_blocks: int | None, attached: bool, keeps: bool
    ) -> None:
        self.index, self.table, self.use = index, table, use
        self.size, self.num_blocks, self.grows = table.group.block_size, 0, num_blocks is None
        self.has_slots = use.slots and not table.group.recurrent
        self.fill = ANY if attached else NEVER
        self.keeps = keeps  # its changes, for `undo`
        self.before: list[tuple[AnyArray, U64, I32]] = []  # slots, what they held and their writers
        self.content: U64 = np.zeros(self.size, np.uint64)
        self.writer: I32 = np.zeros(self.size, np.int32)  # negative: written where it is not due, or not where it is
        # The version of a block: its number, and a count that grows with each change of it.
        self.versions: I64 = np.zeros(1, np.int64)
        if num_blocks is not None and self.has_slots:
            self._resize(num_blocks)
        self.proved: I64 = np.full(table.table.shape, -1, np.int64)  # [R, K] the version when it was last compared
        offsets = np.arange(self.size, dtype=np.int64)
        if (cp := table.context_parallel) is not None:
            run, rest = np.divmod(offsets, cp.interleave)
            offsets = (run * cp.size + cp.rank) * cp.interleave + rest
        self.offsets_in_block: I64 = np.arange(self.size, dtype=np.int64)
        self.offsets: I64 = offsets  # [S] of each slot of a block: its position from the first that the entry covers

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.size

    def _resize(self, num_blocks: int) -> None:
        """Make room for this many blocks, the last of which is not a block of the cache."""
        more = num_blocks - self.num_blocks
        held, new = self.num_slots, np.full(more * self.size, self.fill)
        nothing = np.zeros(self.size, np.uint64)
        self.content = np.concatenate((self.content[:held], new, nothing))
        self.writer = np.concatenate((self.writer[:held], np.zeros((more + 1) * self.size, np.int32)))
        numbers = np.arange(self.num_blocks, num_blocks + 1, dtype=np.int64) << VERSION_BITS
        self.versions = np.concatenate((self.versions[: self.num_blocks], numbers))
        self.num_blocks = num_blocks

    def reserve(self, batch: BatchTensors) -> None:
        """Make room for the blocks of the step."""
        ops = batch.block_ops
        tables = self.table.table[batch.idx_mapping]
        most = 1 + max(int(blocks.max(initial=0)) for blocks in (tables, ops.zero, ops.copies))
        if most > self.num_blocks:
            self.grow(most)

    def grow(self, least: int) -> None:
        """Make room for at least so many blocks."""
        self._resize(max(least, min(2 * self.num_blocks, least + MOST_SPARE)))

    @property
    def is_limited(self) -> bool:
        """Return whether a token does not see all positions before it."""
        return self.use.chunk is not None or self.use.ring is not None or self.table.group.sliding_window is not None

    def entry_of(self, position: int) -> int:
        """Return the entry of a block-table row that leads to the position's key."""
        index = position if self.use.ring is None else position % self.use.ring
        return index // self.table.tokens_per_block

    def width_of(self, end: int) -> int:
        """Return the number of entries that hold positions below ``end``."""
        return -(-(end if self.use.ring is None else min(end, self.use.ring)) // self.table.tokens_per_block)

    def positions(self, entries: I64, ends: I32) -> I64:
        """Return the position whose key each slot of an entry holds, [n, S], for requests of these lengths."""
        if self.use.ring is None:
            return entries[:, None] * self.table.tokens_per_block + self.offsets
        index, last = entries[:, None] * self.size + self.offsets, ends.astype(np.int64)[:, None] - 1
        return np.where(index < self.use.ring, last - (last - index) % self.use.ring, -1)

    def changed(self, batch: BatchTensors, keys: I64, rows: I32, width: int) -> Bools:
        """Return which entries, [B, width], have a block that changed since it was last compared, or are new in this
        step.
        """
        if self.use.ring is not None:
            return np.ones((len(rows), width), np.bool_)
        changed: Bools = keys != self.proved[rows, :width]
        entries = batch.positions[: batch.num_tokens] // self.table.tokens_per_block
        within = entries < width
        changed[batch.req_indices[within], entries[within]] = True
        return changed

    def write(self, slots: AnyArray, prints: U64, writers: I32) -> None:
        if self.keeps:
            self.before.append((slots, self.content[slots], self.writer[slots]))
        self.content[slots], self.writer[slots] = prints, writers
        self.versions[slots // self.size] += 1

    def undo(self) -> None:
        """Undo the writes, the last one first."""
        while self.before:
            slots, content, writers = self.before.pop()
            self.content[slots], self.writer[slots] = content, writers
            self.versions[slots // self.size] += 1

    def reset(self) -> None:
        self.content[: self.num_slots], self.writer[:] = self.fill, 0
        self.versions += 1

    def apply(self, zero: I32, copies: I32) -> None:
        """Zero blocks, then copy blocks: all are read before any is written. Numbers that are not those of a block are
        ignored.
        """
        zero = zero[(zero >= 0) & (zero < self.num_blocks)]
        copies = copies[((copies >= 0) & (copies < self.num_blocks)).all(1)]
        at = self._slots_in(zero)
        self.write(at, np.full(len(at), NEVER), np.zeros(len(at), np.int32))
        source, target = self._slots_in(copies[:, 0]), self._slots_in(copies[:, 1])
        self.write(target, self.content[source], self.writer[source])

    def bring(self, blocks: I32) -> None:
        """Forget the content of blocks that were written outside the steps, also if the last step is taken back."""
        at = self._slots_in(blocks)
        self.content[at], self.writer[at] = NEVER, 0
        self.versions[blocks] += 1
        stays = [~np.isin(slots, at) for slots, _, _ in self.before]
        self.before = [(s[kept], c[kept], w[kept]) for (s, c, w), kept in zip(self.before, stays, strict=True)]

    def _slots_in(self, blocks: I32) -> I64:
        return (blocks.astype(np.int64)[:, None] * self.size + self.offsets_in_block).reshape(-1)

    def mark_stray(self, slots: Ints) -> None:
        slots = slots[(slots >= 0) & (slots < self.num_slots)]
        writers = self.writer[slots]
        self.writer[slots] = np.where(writers == 0, -INT32_MAX, -np.abs(writers))

    def excuse(self, slots: AnyArray) -> None:
        """Let these slots count as right until they are written again; those of the null block stay."""
        first = max(self.table.null_block, 0) * self.size
        null = (slots >= first) & (slots < first + self.size) if self.table.null_block >= 0 else slots < 0
        self.content[slots[~null & (slots < self.num_slots)]] = ANY
