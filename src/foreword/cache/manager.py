"""Allocation of KV blocks to rows, sharing of prefixes between them, and release."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.arrays import I32, I64, Bools, Ints
from foreword.batch import BlockTable, RequestStates
from foreword.cache.content import CachedContent
from foreword.cache.events import CacheEvent
from foreword.cache.groups import cache_group, longest_common_hit
from foreword.cache.hits import PrefixHit
from foreword.cache.miss import CacheMiss, MissReason, first_ids, parting
from foreword.cache.pool import BlockNumbers, BlockPool
from foreword.cache.prefix import (
    NO_EXTRA,
    ROOT_HASH,
    BlockKeys,
    ExtraKeys,
    HashFunction,
    PrefixNode,
    PrefixTree,
    hash_block,
)
from foreword.cache.snapshots import NO_BLOCKS, NO_COPIES, StateSnapshots
from foreword.cache.tiers import block_name

NO_KEYS: BlockKeys = {}
_NO_ROW = -1  # the path of content that no request has


@dataclass(slots=True, eq=False)
class Allocation:
    """Blocks for a request that is not yet in a row. Not to be changed; not frozen, for speed.

    block_ids: int32, one array per group, for `NewRequest.block_ids`. copies: int32 [C, 2] (from, to), to make before
    the next forward pass: all sources are read before any destination is written.
    """

    block_ids: tuple[I32, ...]
    copies: I32


@dataclass(frozen=True, slots=True, eq=False)
class NamedBlocks:
    """Blocks with which the beginning of a prompt can be reused, in the order of the prompt.

    names: the name of each block, see `block_name`. groups, indices: int32, its KV group, and its index in the prompt,
    in blocks of that group. blocks: int32, where it is in the pool, 0 where it is not. num_tokens: the number of tokens
    that can be reused with them; num_held: the number with only the blocks of the pool. held: in the result of
    `outside`, the blocks of the pool that are reused with them, int32.
    """

    names: tuple[bytes, ...]
    groups: I32
    indices: I32
    blocks: I32
    num_tokens: int
    num_held: int
    held: I32


class KVCacheManager:
    """One pool of blocks for all groups of a model, held by the rows of a `RequestStates`. The states of recurrent
    groups have a pool of their own if there are ``num_states`` slots for them, whose numbers follow those of blocks.

        blocks = cache.allocate(hit, num_tokens)             # the scheduler then adds the row with blocks.block_ids
        cache.attach(row, hit, keys)
        cache.grow_to(rows, num_tokens); cache.publish(row)  # while it runs
        cache.free(row)                                      # the scheduler then removes the row

    The manager owns blocks only: rows are added and removed by the scheduler.

    Whole blocks of a prompt can be hit as soon as they are computed, the blocks of the output when the request ends, so
    a decode step hashes nothing. A recurrent state is overwritten by every step, so snapshots of it are kept at few
    places (`StateSnapshots`), and a hit of a model with recurrent groups ends at a snapshot.

    Blocks of row r in group g, with S the block size:

        [0, first_live)           null: below the sliding window, freed
        [first_live, num_blocks)  one reference each; shared blocks (refs > 1) are full and never written again
        slots [num_computed, num_blocks·S)  owned, not yet written, never read
    """

    def __init__(
        self,
        states: RequestStates,
        num_blocks: int,
        *,
        num_states: int = 0,
        prefix_caching: bool = True,
        partial_reuse: bool = True,
        hash_function: HashFunction = hash_block,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        self.states = states
        self.groups = tuple(cache_group(t.group, t.context_parallel) for t in states.block_tables)
        sizes = [g.block_size for g in self.groups]
        self._node_blocks = tuple(size // math.gcd(*sizes) for size in sizes)
        self._node_tokens = math.gcd(*sizes)  # tokens in a block of the tree
        self._hit_unit = math.lcm(*sizes)
        numbers = BlockNumbers(num_blocks + num_states)

        def evict(blocks: Ints) -> None:
            self._content.remove(blocks)

        self.pool = self.state_pool = BlockPool(num_blocks, evict, numbers=numbers)
        if num_states:
            self.state_pool = BlockPool(num_states, evict, numbers=numbers, first=num_blocks)
            self.state_pool.observers = self.pool.observers
        self._pools = (self.pool, self.state_pool)[: 1 + self.has_state_pool]
        self._content = CachedContent(
            self._node_tokens, self._node_blocks, numbers.is_cached, hash_function=hash_function, on_event=on_event
        )
        self._hash_function = hash_function
        self.prefix_caching = prefix_caching
        self.partial_reuse = partial_reuse and len(set(sizes)) == 1 and all(g.allows_partial_hit for g in self.groups)
        self._keys: list[BlockKeys] = [NO_KEYS] * states.max_num_reqs
        self._first_live = tuple(np.zeros(states.max_num_reqs, np.int64) for _ in self.groups)
        self._windowed = tuple(g for g, t in enumerate(states.block_tables) if t.group.sliding_window is not None)
        self._paged = tuple(g for g, t in enumerate(states.block_tables) if not t.group.recurrent)
        recurrent = {g: t for g, t in enumerate(states.block_tables) if t.group.recurrent}
        # By group: whether its blocks are state slots.
        self.is_apart = tuple(self.has_state_pool and t.group.recurrent for t in states.block_tables)
        # The slots for states after drafts. The others, at most half, are left to requests.
        self._most_after_drafts = num_states - min(states.max_num_reqs * sum(self.is_apart), num_states // 2)
        self._snapshots: StateSnapshots | None = None
        if recurrent and prefix_caching:
            self._snapshots = StateSnapshots(self._content, self.state_pool, recurrent, self._hit_unit, states)
        # True if `cut_chunks`, `keep_states` and `publish_states` have any effect.
        self.keeps_states = self._snapshots is not None

    @property
    def has_state_pool(self) -> bool:
        """True if recurrent states have a pool of their own, ``state_pool``; else it is the pool of blocks."""
        return self.state_pool is not self.pool

    @property
    def tree(self) -> PrefixTree:
        """The known prefixes, including those whose content no block holds."""
        return self._content.tree

    @property
    def version(self) -> int:
        """A number that grows whenever the answer of a lookup may change."""
        return self._content.version

    # -- lookup and admission ----------------------------------------------------------------------------------

    def lookup(self, token_ids: I32, keys: BlockKeys = NO_KEYS) -> PrefixHit:
        """Return the longest reusable prefix of a request's tokens, at most all but the last. Change nothing.

        keys: node index → what else must be equal there (adapter, image, salt); see `foreword.cache.keys`.
        """
        size, limit = self._node_tokens, len(token_ids) - 1
        if not self.prefix_caching:
            return self.miss(len(token_ids))
        data = self._content_of(token_ids)
        if data[:4] not in self.tree.root.children:
            return self.miss(len(token_ids), 0, self._block_after(data, 0, limit))
        path, known = self.tree.walk(data, keys)
        held, full = [NO_BLOCKS] * len(self.groups), 0
        if path:
            held = [
                np.concatenate([node.blocks[g] for node in path])[ratio - 1 : known : ratio]
                for g, ratio in enumerate(self._node_blocks)
            ]
            most = min(limit, known * size)
            full = longest_common_hit(self.groups, [ids != 0 for ids in held], most, self._hit_unit)
        num_partial, copy_from = self._partial(path, full, data, limit, keys)
        if self._snapshots is not None and full:
            copy_from = self._snapshots_at(held, full)
        end = path[-1] if path else self.tree.root
        following = self.tree.best_partial(end, known, data[4 * known * size :], keys.get(known, NO_EXTRA))
        num_known = known * size + (following[1] if following else 0)
        blocks = self._hit_blocks(held, full) if full else (NO_BLOCKS,) * len(self.groups)
        if full and not copy_from.any() and not any(ids.any() for ids in blocks):
            # Windows of one token read no block of the hit: taking the request's blocks might evict all of its path.
            full, num_partial, blocks = 0, 0, (NO_BLOCKS,) * len(self.groups)
        return PrefixHit(
            prompt_len=len(token_ids),
            num_full=full,
            num_partial=num_partial,
            blocks=blocks,
            copy_from=copy_from,
            path=tuple(path),
            num_known=num_known,
            stops=self._stops(len(token_ids), num_known),
            next_block=self._block_after(data, full, limit),
        )

    def why_missed(self, hit: PrefixHit, token_ids: I32, keys: BlockKeys = NO_KEYS) -> CacheMiss | None:
        """Return why no more of a request was reused than a hit that is valid now; None if all but its last token was.

        It takes a few comparisons of blocks per request.
        """
        reused, total, known = hit.num_tokens, hit.prompt_len, hit.num_known
        if reused == total - 1:
            return None
        data = self._content_of(token_ids)
        position, theirs = reused, b""
        reason: MissReason = "off"
        if known > reused:
            reason = self._lost(hit)
        elif known >= 0:
            reason, position, theirs = parting(self.tree, hit, data, keys)
            position = max(position, reused)  # a part of a block may be reused where other keys share more of it
        return CacheMiss(reason, total, reused, position, first_ids(data[4 * position :]), first_ids(theirs))

    def _lost(self, hit: PrefixHit) -> MissReason:
        """Return why content that the tree knows after the end of a hit cannot be reused."""
        size, at = self._node_tokens, hit.num_tokens // self._node_tokens
        if not hit.path and hit.num_known >= size:
            return "no_blocks"
        if self._snapshots is not None:
            return "state"
        if hit.num_known - hit.num_full < self._hit_unit or not hit.path:
            return "part_of_block"
        node = next((node for node in hit.path if at < node.end), hit.path[-1])
        held = [bool(blocks[min(at, node.end - 1) - node.start]) for blocks in node.blocks]
        is_held = all(one for g, one in enumerate(held) if g not in self._windowed)
        return "window" if self._windowed and is_held else "evicted"

    def miss(self, num_tokens: int, num_known: int = -1, next_block: bytes = b"") -> PrefixHit:
        """Return an empty hit for a request of ``num_tokens``. num_known: see `PrefixHit`; −1 without a lookup."""
        stops, no_blocks = self._stops(num_tokens, max(num_known, 0)), (NO_BLOCKS,) * len(self.groups)
        return PrefixHit(num_tokens, 0, 0, no_blocks, NO_BLOCKS, (), num_known, stops, next_block)

    # -- blocks that are kept outside the pool ------------------------------------------------------------------------

    def outside(self, token_ids: I32, keys: BlockKeys, find: Callable[[Sequence[bytes]], Bools]) -> NamedBlocks | None:
        """Return the blocks that a longer hit of a request needs and the pool lacks, of those that ``find`` finds; None
        if there is no longer hit. Changes nothing.
        """
        found = self.named(token_ids, keys, len(token_ids) - 1, find)
        if found.num_tokens <= found.num_held:
            return None
        lacking = np.flatnonzero(found.blocks == 0)
        names = tuple(found.names[i] for i in lacking.tolist())
        return NamedBlocks(names, found.groups[lacking], found.indices[lacking], found.blocks[lacking],
                           found.num_tokens, found.num_held, found.blocks[found.blocks != 0])  # fmt: skip

    def named(
        self, token_ids: I32, keys: BlockKeys, limit: int, find: Callable[[Sequence[bytes]], Bools]
    ) -> NamedBlocks:
        """Return the blocks with which most of the first ``limit`` of a request's tokens can be reused: those of the
        pool, and others that ``find`` finds. Changes nothing. The cache must have ``on_event``, so that its blocks have
        names.
        """
        size = self._node_tokens
        if not self.prefix_caching or limit < self._hit_unit:
            return NamedBlocks((), NO_BLOCKS, NO_BLOCKS, NO_BLOCKS, 0, 0, NO_BLOCKS)
        data = self._content_of(token_ids)
        path, known = self.tree.walk(data, keys)
        hashes = self._hashes(path, known, data, limit // size, keys)
        held: list[I32] = []
        lacking: list[tuple[int, int]] = []
        for g, ratio in enumerate(self._node_blocks):
            blocks = np.zeros(limit // (size * ratio), np.int32)
            own = np.concatenate([NO_BLOCKS, *(node.blocks[g] for node in path)])[ratio - 1 : known : ratio]
            blocks[: len(own)] = own[: len(blocks)]
            held.append(blocks)
            lacking += [(g, index) for index in np.flatnonzero(blocks == 0).tolist()]

        def name(g: int, index: int) -> bytes:
            return block_name(hashes[(index + 1) * self._node_blocks[g] - 1], g)

        there = [blocks != 0 for blocks in held]
        before = longest_common_hit(self.groups, there, limit, self._hit_unit)
        for (g, index), is_found in zip(lacking, find([name(*one) for one in lacking]).tolist(), strict=True):
            there[g][index] = is_found or there[g][index]
        after = longest_common_hit(self.groups, there, limit, self._hit_unit)
        wanted: list[tuple[int, int, int]] = []  # where it ends, group, index
        for g, group in enumerate(self.groups):
            end = after // group.block_size
            first = int(group.first_needed(np.array([after]))[0]) if g in self._paged else max(end - 1, 0)
            wanted += [((i + 1) * group.block_size, g, i) for i in range(first, end)]
        wanted.sort()
        groups, indices = (np.array([one[k] for one in wanted], np.int32) for k in (1, 2))
        blocks = np.array([held[g][i] for _, g, i in wanted], np.int32)
        names = tuple(name(g, i) for _, g, i in wanted)
        return NamedBlocks(names, groups, indices, blocks, after, before, NO_BLOCKS)

    def bring(self, token_ids: I32, keys: BlockKeys, groups: I32, indices: I32, blocks: I32) -> None:
        """Make blocks hittable that `take` gave and that hold blocks ``indices`` of the KV groups ``groups`` of a
        request's tokens, and free them.
        """
        data, ratios = self._content_of(token_ids), np.array(self._node_blocks)
        last = (indices.astype(np.int64) + 1) * ratios[groups] - 1  # the tree's block that each is kept at
        with self._content.changes:
            self.tree.attach(_NO_ROW, (), 0)
            for node, first, end in self.tree.extend(_NO_ROW, data[: self.tree.bytes_of(int(last.max()) + 1)], keys):
                for g in range(len(self.groups)):
                    here = np.flatnonzero((groups == g) & (last >= first) & (last < end))
                    if here.size:
                        self._content.hold(node, g, blocks[here].astype(np.intp), last[here])
            self.tree.detach(_NO_ROW)
        self._free(blocks[::-1].copy())

    def fit(self, groups: I32) -> bool:
        """Return whether a block is free for each of these KV groups."""
        num_states = self._num_apart(groups)
        return len(groups) - num_states <= self.pool.num_free and num_states <= self.state_pool.num_free

    def take(self, groups: I32) -> I32:
        """Take a block for each of these KV groups, int32 [len(groups)]. Raise CapacityError, and change nothing, if
        fewer are free.
        """
        is_apart = np.array(self.is_apart)[groups]
        blocks, num_states = np.empty(len(groups), np.int32), self._num_apart(groups)
        self.state_pool.check_free(num_states)
        blocks[~is_apart] = self.pool.allocate(len(groups) - num_states)
        blocks[is_apart] = self.state_pool.allocate(num_states)
        return blocks

    def refresh(self, blocks: I32) -> None:
        """Make cached blocks the last to be evicted, of those the first one given last."""
        for pool, own in self.by_pool(blocks):
            pool.touch(own)
            pool.free(own[::-1].copy())

    def _num_apart(self, groups: I32) -> int:
        return int(np.count_nonzero(np.array(self.is_apart)[groups]))

    def by_pool(self, blocks: I32) -> list[tuple[BlockPool, I32]]:
        """Return each pool, and those of the blocks that are its own."""
        if not self.has_state_pool:
            return [(self.pool, blocks)]
        is_block = blocks < self.pool.num_blocks
        return [(self.pool, blocks[is_block]), (self.state_pool, blocks[~is_block])]

    def _free(self, blocks: I32) -> None:
        for pool, own in self.by_pool(blocks):
            pool.free(own)

    def _hashes(self, path: list[PrefixNode], known: int, data: bytes, count: int, keys: BlockKeys) -> list[bytes]:
        """Return the hashes of the first ``count`` blocks of the tree of a prompt whose path has ``known`` blocks."""
        hashes = [one for node in path for one in node.hashes][: min(known, count)]
        before = hashes[-1] if hashes else ROOT_HASH
        for i in range(len(hashes), count):
            tokens = data[self.tree.bytes_of(i) : self.tree.bytes_of(i + 1)]
            before = self._hash_function(before, tokens, keys.get(i, NO_EXTRA))
            hashes.append(before)
        return hashes

    def _block_after(self, data: bytes, at: int, limit: int) -> bytes:
        """Return the content of the block that begins with token ``at``; b"" if it reaches beyond the first ``limit``
        tokens.
        """
        size = self.tree.bytes_of(self._hit_unit // self._node_tokens)
        start = self.tree.bytes_of(at // self._node_tokens)
        return data[start : start + size] if at + self._hit_unit <= limit else b""

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int, *, chunk: int | None = None) -> int:
        """Return the number of free blocks of `pool` that a request takes to hold num_tokens: new blocks, and hit
        blocks without an owner.

        chunk: the tokens computed per step; a windowed group frees blocks between steps. None: all are computed in one
        step.
        """
        new = 0
        for group, blocks, is_apart in zip(self.groups, hit.blocks, self.is_apart, strict=True):
            if not is_apart:
                most = group.most_blocks(num_tokens, num_tokens if chunk is None else chunk)
                new += min(-(-num_tokens // group.block_size) - len(blocks), most)
        if not hit.num_tokens:
            return new
        return new + self._num_unowned(*hit.blocks, *(() if self.has_state_pool else (hit.copy_from,)))

    def states_to_admit(self, hit: PrefixHit) -> int:
        """Return the number of free slots of `state_pool` that a request takes: for its states, and snapshots without
        an owner. 0 if states have no pool of their own.
        """
        if not self.has_state_pool:
            return 0
        return sum(self.is_apart) + (self._num_unowned(hit.copy_from) if hit.num_tokens else 0)

    def num_free_states(self, wanted: int) -> int:
        """Return how many state slots are free. If fewer than ``wanted`` are, snapshots whose step is not committed are
        dropped for them.
        """
        if wanted > self.state_pool.num_free and self._snapshots is not None:
            self._snapshots.drop_pending()
        return self.state_pool.num_free

    def _num_unowned(self, *blocks: I32) -> int:
        reused = np.concatenate(blocks)
        return int(np.count_nonzero((self.pool.num_refs[reused] == 0) & (reused != 0)))

    def blocks_reserved(self, rows: Ints) -> int:
        """Return the number of blocks that these rows still need for the rest of their prompts.

        A windowed group frees blocks as it takes new ones, so it reserves none.
        """
        rows = rows.astype(np.intp)
        prefill = self.states.prefill_len[rows]
        if not np.count_nonzero(self.states.num_computed_tokens[rows] < prefill):
            return 0
        full = [t for g, t in enumerate(self.states.block_tables) if g not in self._windowed]
        return sum(int(np.maximum(-(-prefill // t.tokens_per_block) - t.num_blocks[rows], 0).sum()) for t in full)

    def allocate(self, hit: PrefixHit, num_tokens: int) -> Allocation:
        """Take blocks for the first ``num_tokens`` tokens of a request, the hit's among them.

        Raise CapacityError, and change nothing, if there are too few free blocks.
        """
        pool, of_sources, kept, sources = self.pool, self.state_pool, NO_BLOCKS, NO_BLOCKS
        if hit.num_tokens:
            kept = np.concatenate(hit.blocks)
            kept, sources = kept[kept != 0], hit.copy_from[hit.copy_from != 0]
            pool.touch(kept)
            of_sources.touch(sources)  # so that no new block is a source
        tables = self.states.block_tables
        new = [-(-num_tokens // t.tokens_per_block) - len(b) for t, b in zip(tables, hit.blocks, strict=True)]
        try:
            parts = self._take_for(new)
        except Exception:
            pool.free(kept)
            raise
        finally:
            if len(sources):
                of_sources.free(sources)
        copies = NO_COPIES
        if len(sources):
            copies = np.array([(hit.copy_from[g], parts[g][0]) for g in hit.copy_from.nonzero()[0]], np.int32)
        if hit.num_full:
            parts = [np.concatenate(both) for both in zip(hit.blocks, parts, strict=True)]
        return Allocation(tuple(parts), copies)

    def _take_for(self, counts: list[int]) -> list[I32]:
        """Take counts[g] blocks for each group g. Raise CapacityError, and change nothing, if fewer are free."""
        if not self.has_state_pool:
            fresh = self.pool.allocate(sum(counts))
            return np.split(fresh, np.cumsum(counts)[:-1]) if len(counts) > 1 else [fresh]
        blocks = self.take(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        return np.split(blocks, np.cumsum(counts)[:-1])

    def cancel(self, allocation: Allocation) -> None:
        """Free the blocks of a request that got no row."""
        self._free(np.concatenate(allocation.block_ids))

    def attach(self, row: int, hit: PrefixHit, keys: BlockKeys = NO_KEYS) -> None:
        """Follow a row that was added with an allocation for this hit."""
        with self._content.changes:
            self.tree.attach(row, hit.path, hit.num_full // self._node_tokens)
        self._keys[row] = keys
        for live, blocks in zip(self._first_live, hit.blocks, strict=True):
            live[row] = int(np.argmax(blocks != 0)) if len(blocks) and blocks[-1] else len(blocks)
        if self._snapshots is not None:
            self._snapshots.attach(row, hit.stops, hit.num_full)

    def next_block(self, row: int) -> tuple[int, bytes]:
        """Return the first token and the content of the first block of the row's prompt that lookups do not find; b""
        if there is none.
        """
        at = self.tree.path_end(row)[1] * self._node_tokens // self._hit_unit * self._hit_unit
        end = at + self._hit_unit
        return at, self._content_in(row, at, end) if end <= self.states.prefill_len[row] else b""

    def continues(self, row: int, hit: PrefixHit, keys: BlockKeys) -> bool:
        """Return whether the row begins with the whole blocks of a hit, and has the extra keys of the block
        after them.
        """
        end = hit.num_full // self._node_tokens
        if end and self.tree.node_of(row, end - 1) is not self.tree.node_at(hit.path, end):
            return False
        block = range(end, end + self._hit_unit // self._node_tokens)
        return all(self._keys[row].get(i, NO_EXTRA) == keys.get(i, NO_EXTRA) for i in block)

    # -- growth: the hot path, arrays only ------------------------------------------------------------------------

    def grow_to(self, rows: Ints, num_tokens: Ints, num_drafts: I32 | None = None) -> bool:
        """Append the blocks that each of these rows lacks to hold num_tokens[i] tokens, the last num_drafts[i] of them
        drafts. None: no row has drafts. A recurrent group has one more block for each draft, for the state after it.

        Return False, and change nothing, if fewer blocks are free, or if slots for states after drafts would be missing
        for the first states of requests.
        """
        total, growth = [0, 0], []  # the numbers of blocks, and of state slots
        for table, is_apart in zip(self.states.block_tables, self.is_apart, strict=True):
            held, per_block, need = table.num_blocks.take(rows), table.tokens_per_block, num_tokens
            if table.group.recurrent:
                if num_drafts is None:
                    continue  # it was admitted with a block
                per_block, need = 1, 1 + num_drafts
            short = need - held * per_block
            lacking = (short > 0).nonzero()[0]  # there are usually few
            if lacking.size:
                held = held[lacking]
                count = -(-short[lacking] // per_block)
                start, total[is_apart] = total[is_apart], total[is_apart] + int(np.add.reduce(count))
                part = is_apart, slice(start, total[is_apart])
                growth.append((table, rows[lacking].astype(np.intp), held, count, part))
        if growth:
            if total[0] > self.pool.num_free or total[1] > self.state_pool.num_free:
                return False
            if total[1] and total[1] + self._num_after_drafts() > self._most_after_drafts:
                return False
            fresh = self.pool.allocate(total[0]), self.state_pool.allocate(total[1]) if total[1] else NO_BLOCKS
            for table, some, held, count, (is_apart, own) in growth:
                _append(table, some, held, count, fresh[is_apart][own])
        return True

    def _num_after_drafts(self) -> int:
        """Return the number of slots that requests hold for states after drafts."""
        tables = (t for t, is_apart in zip(self.states.block_tables, self.is_apart, strict=True) if is_apart)
        return sum(int(np.maximum(table.num_blocks - 1, 0).sum()) for table in tables)

    def num_free_slots(self, rows: I32, num_tokens: I32) -> int:
        """Return the number of tokens that each of these rows can add to num_tokens[i] before a block is taken or
        freed.
        """
        if self._windowed or self.keeps_states or not len(rows):
            return 0
        held = [table.num_blocks.take(rows) * table.tokens_per_block for table in self.states.block_tables]
        return int(min(np.subtract(slots, num_tokens).min() for slots in held))

    def free_expired(self, rows: I32, num_computed: Ints) -> None:
        """Free the blocks that no token from ``num_computed`` on can read; their entries become null."""
        for g in self._windowed:
            live, table = self._first_live[g], self.states.block_tables[g].table
            needed = self.groups[g].first_needed(num_computed)
            expired = np.flatnonzero(needed > live[rows])
            if not expired.size:
                continue
            chosen, start = rows[expired], live[rows[expired]]
            count = needed[expired] - start
            within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            at = np.repeat(chosen, count), np.repeat(start, count) + within
            unread = table[at]
            table[at] = 0
            ids = self.states.block_tables[g]
            ids.content_id[chosen] = ids.ids.take(len(chosen)) + np.arange(len(chosen))
            live[chosen] = needed[expired]
            self.pool.free(unread, group=g)

    # -- recurrent states, in a model that has them: see `keeps_states` ----------------------------------------------

    def cut_chunks(self, rows: I32, computed: I32, n: I32) -> I32:
        """Return how many of n[i] tokens after computed[i] are before the next place where the row's state should
        be kept.
        """
        return n if self._snapshots is None else self._snapshots.cut(rows, computed, n)

    def keep_states(self, rows: I32, computed: I32) -> I32:
        """Return the copies, int32 [C, 2] (from, to), that keep the states after computed[i] tokens at stops and
        intervals.

        Call it with the running rows of the next step, after all other allocations; the copies are made before it.
        """
        return NO_COPIES if self._snapshots is None else self._snapshots.keep(rows, computed)

    def publish_states(self) -> None:
        """Make the snapshots hittable whose step is committed."""
        if self._snapshots is not None:
            for row in self._snapshots.pending:
                self.publish(row)

    # -- after a step, and at the end --------------------------------------------------------------------------------

    def publish(self, row: int) -> None:
        """Make the row's computed whole blocks hittable, and the computed tokens after them by copy."""
        if not self.prefix_caching:
            return
        with self._content.changes:
            self._publish(row)

    def _publish(self, row: int) -> None:
        states, size, keys = self.states, self._node_tokens, self._keys[row]
        done = self.tree.path_end(row)[1]
        computed = min(int(states.num_computed_tokens[row]), int(states.num_tokens[row]))
        data = self._content_in(row, done * size, computed)
        end = computed // size
        if done < end:
            for g in self._paged:  # a partial block has become a whole one
                ratio = self._node_blocks[g]
                block = states.block_tables[g].table[row, done // ratio]
                if end // ratio > done // ratio and block and self.pool.is_cached[block]:
                    self._content.remove(np.array([block]))
            for span in self.tree.extend(row, data, keys):
                for g in self._paged:
                    self._content.record(*span, g, states.block_tables[g].table[row])
        if self._snapshots is not None:
            self._snapshots.publish(row, computed)
        if self.partial_reuse and computed % size:
            self._publish_partial(row, data[-4 * (computed % size) :], keys.get(end, NO_EXTRA))

    def free(self, row: int, *, publish: bool = True) -> None:
        """Free the row's blocks, tail first; the caller then removes the row.

        publish: whether the content that the row computed can be hit from now on; False if it may not have been
        computed.
        """
        if publish:
            self.publish(row)
        last = NO_BLOCKS if self._snapshots is None else self._snapshots.detach(row)
        with self._content.changes:
            self.tree.detach(row)
        self._keys[row] = NO_KEYS
        for g, (table, live) in enumerate(zip(self.states.block_tables, self._first_live, strict=True)):
            held = table.table[row, live[row] : table.num_blocks[row]][::-1].copy()
            pool = self.state_pool if self.is_apart[g] else self.pool
            pool.free(held, group=g, distinct=True)
            live[row] = 0
        if len(last):
            self.state_pool.free(last)

    def free_all(self) -> None:
        """Free the blocks of all rows, also after a change that was interrupted; the caller removes the rows.

        Cached content stays, unless a change of it was interrupted.
        """
        self._content.detach_all()
        if self._snapshots is not None:
            self._snapshots.detach_all()
        self._keys[:] = [NO_KEYS] * len(self._keys)
        for table, live in zip(self.states.block_tables, self._first_live, strict=True):
            table.clear_all()
            live[:] = 0
        for pool in self._pools:
            pool.free_all()

    def reset(self) -> bool:
        """Forget all cached content. Return False, and change nothing, while a request holds blocks."""
        if any(pool.num_used for pool in self._pools):
            return False
        self._content.clear()
        return True

    # -- content -----------------------------------------------------------------------------------------------------

    def _content_of(self, token_ids: I32) -> bytes:
        """Return the bytes by which blocks of these tokens are compared."""
        return np.ascontiguousarray(token_ids, np.int32).tobytes()

    def _content_in(self, row: int, start: int, end: int) -> bytes:
        """Return the content of the row's tokens from start to end."""
        return self.states.token_ids[row, start:end].tobytes()

    def _hit_blocks(self, held: list[I32], full: int) -> tuple[I32, ...]:
        out = []
        for g, (group, ids) in enumerate(zip(self.groups, held, strict=True)):
            blocks = ids[: full // group.block_size] if g in self._paged else NO_BLOCKS
            if g in self._windowed:
                blocks = blocks.copy()
                blocks[: int(group.first_needed(np.array([full]))[0])] = 0
            out.append(blocks)
        return tuple(out)

    def _snapshots_at(self, held: list[I32], full: int) -> I32:
        """Return the snapshot of each recurrent group after ``full`` tokens; 0 for the other groups."""
        at = [full // group.block_size - 1 for group in self.groups]
        return np.array([0 if g in self._paged else held[g][at[g]] for g in range(len(at))], np.int32)

    def _stops(self, num_tokens: int, num_known: int) -> tuple[int, ...]:
        return () if self._snapshots is None else self._snapshots.stops(num_tokens, num_known)

    def _partial(self, path: list[PrefixNode], full: int, data: bytes, limit: int, keys: BlockKeys) -> tuple[int, I32]:
        size = self.tree.block_size
        i = full // size
        if not self.partial_reuse or limit <= full:
            return 0, NO_BLOCKS
        wanted = data[4 * full : 4 * min(full + size, limit)]
        best = self.tree.best_partial(self.tree.node_at(path, i), i, wanted, keys.get(i, NO_EXTRA))
        if best is None:
            return 0, NO_BLOCKS
        node, shared = best
        sources = np.array([ids[i - node.start] for ids in node.blocks], np.int32)
        return (shared, sources) if sources.all() else (0, NO_BLOCKS)

    def _publish_partial(self, row: int, tokens: bytes, extra: ExtraKeys) -> None:
        end, at = self.tree.path_end(row)
        known = self.tree.best_partial(end, at, tokens, extra)
        if known is not None and known[1] * 4 == len(tokens):
            return  # these tokens, or a longer block that begins with them
        leaf = self.tree.leaf(row, tokens, extra)
        for g, table in enumerate(self.states.block_tables):
            self._content.record(leaf, at, at + 1, g, table.table[row])
        self.tree.prune(leaf)


def _append(table: BlockTable, rows: I64, held: I32, count: Ints, blocks: I32) -> None:
    """Append count[i] of the blocks to row i, which holds held[i]."""
    if len(blocks) == len(rows):
        table.table[rows, held] = blocks
    else:
        within = np.arange(len(blocks)) - np.repeat(np.cumsum(count) - count, count)
        table.table[np.repeat(rows, count), np.repeat(held, count) + within] = blocks
    table.num_blocks[rows] = held + count
