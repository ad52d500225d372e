"""The KV cache of an engine: gives rows their blocks, shares prefixes between them, takes blocks back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foreword.batch import NewRequest, RequestStates
from foreword.cache.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from foreword.cache.groups import cache_group, longest_common_hit
from foreword.cache.hits import PrefixHit
from foreword.cache.pool import BlockIds, BlockPool
from foreword.cache.prefix import ExtraKeys, HashFunction, PrefixNode, PrefixTree, hash_block

Rows = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
BlockKeys = Mapping[int, ExtraKeys]
BlockCopies = tuple[list[int], list[int]]

NO_KEYS: BlockKeys = {}
UNPUBLISHABLE = -1


class KVCache:
    """One pool of blocks for all groups of a model, and the rows of `RequestStates` that hold them.

    Whole blocks of a prompt can be hit as soon as they are computed; the blocks of a request's own output when it
    leaves. So a decode step hashes nothing.

    Ownership of row r in group g, with S the block size:

        [0, first_live)           null: below the sliding window, given back
        [first_live, num_blocks)  one reference each; shared blocks (refs > 1) are full and never written again
        slots [num_computed, num_blocks·S)  owned, not yet written, never read
    """

    def __init__(
        self,
        states: RequestStates,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        partial_reuse: bool = True,
        hash_function: HashFunction = hash_block,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        self.states = states
        self.groups = tuple(cache_group(t.group, states.max_model_len) for t in states.block_tables)
        self.pool = BlockPool(num_blocks, self._forget)
        sizes = [g.block_size for g in self.groups]
        # A running state has no prefix to share, so a model with one computes every prompt in full.
        self.prefix_caching = prefix_caching and not any(t.group.recurrent for t in states.block_tables)
        self.partial_reuse = partial_reuse and len(set(sizes)) == 1 and all(g.allows_partial_hit for g in self.groups)
        self.tree = PrefixTree(math.gcd(*sizes), hash_function)
        self.version = 0  # grows whenever the answer of a lookup may change
        self._hit_unit = math.lcm(*sizes)
        self._node_blocks = tuple(size // self.tree.block_size for size in sizes)
        self._on_event = on_event
        self._content: dict[int, tuple[PrefixNode, int]] = {}  # cached block → its node and group
        rows = states.max_num_reqs
        self._tips: list[PrefixNode | None] = [None] * rows
        self._keys: list[BlockKeys] = [NO_KEYS] * rows
        self._num_published = np.zeros(rows, np.int64)  # nodes on the path to the tip
        self._first_live = tuple(np.zeros(rows, np.int64) for _ in self.groups)
        self._windowed = tuple(g for g, t in enumerate(states.block_tables) if t.group.sliding_window is not None)

    # -- lookup and admission ----------------------------------------------------------------------------------

    def lookup(self, token_ids: npt.NDArray[np.int32], keys: BlockKeys = NO_KEYS) -> PrefixHit:
        """The longest reusable prefix of a request's tokens, at most all but the last. Changes nothing.

        keys: node index → what else must be equal there (adapter, image, salt); see `foreword.cache.keys`.
        """
        size, limit = self.tree.block_size, len(token_ids) - 1
        if not self.prefix_caching:
            return self.miss(len(token_ids))
        data = np.ascontiguousarray(token_ids, np.int32).tobytes()
        path: list[PrefixNode] = []
        node = self.tree.root
        for i in range(len(token_ids) // size):
            child = self.tree.find(node, data[4 * i * size : 4 * (i + 1) * size], keys.get(i, ()))
            if child is None:
                break
            path.append(child)
            node = child
        present = [
            [g in path[i].blocks for i in range(ratio - 1, len(path), ratio)]
            for g, ratio in enumerate(self._node_blocks)
        ]
        full = longest_common_hit(self.groups, present, min(limit, len(path) * size), self._hit_unit)
        num_partial, copy_from = self._partial(path, full, data, limit, keys)
        known = len(path) * size
        following = self.tree.best_partial(node, data[4 * known :], keys.get(len(path), ()))
        return PrefixHit(
            prompt_len=len(token_ids),
            num_full=full,
            num_partial=num_partial,
            blocks=self._hit_blocks(path, full),
            copy_from=copy_from,
            path=tuple(path[: full // size]),
            num_known=known + (following[1] if following else 0),
        )

    def miss(self, num_tokens: int) -> PrefixHit:
        """The hit of nothing, for a request of ``num_tokens``."""
        return PrefixHit(num_tokens, 0, 0, tuple(() for _ in self.groups), (), (), 0)

    def blocks_to_admit(self, hit: PrefixHit, num_tokens: int, *, chunk: int | None = None) -> int:
        """Free blocks that a request consumes to hold num_tokens: new ones, and hit ones that nobody owns now.

        chunk: tokens computed a step, so that a windowed group gives blocks back on the way; None: all in one step.
        """
        new = 0
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            most = group.most_blocks(num_tokens, num_tokens if chunk is None else chunk)
            new += min(-(-num_tokens // group.block_size) - len(blocks), most)
        reused = {b for blocks in (*hit.blocks, hit.copy_from) for b in blocks if b}
        return new + sum(1 for b in reused if not self.pool.num_refs[b])

    def blocks_reserved(self, rows: Rows) -> int:
        """Blocks that these rows still want for the rest of their prompts.

        A windowed group gives back what it takes while it goes, so it reserves none.
        """
        prefill = self.states.prefill_len[rows]
        full = [g for g in range(len(self.groups)) if g not in self._windowed]
        wanted = self.wanted(rows, prefill)
        return sum(int(wanted[g].sum()) for g in full)

    def admit(
        self, request: NewRequest, hit: PrefixHit, num_tokens: int, keys: BlockKeys = NO_KEYS
    ) -> tuple[int, BlockCopies]:
        """Give a request a row and blocks for its first ``num_tokens`` tokens, the hit's among them.

        Returns the row and the copies (sources, destinations) to make before the next forward pass: all sources are
        read before any destination is written. CapacityError when blocks or rows are short, and nothing changes.
        """
        pool = self.pool
        kept = np.array(sorted({b for blocks in hit.blocks for b in blocks if b}), np.int32)
        sources = np.array(sorted(set(hit.copy_from)), np.int32)
        pool.touch(kept)
        pool.touch(sources)  # so that allocate does not take a source
        new = [-(-num_tokens // g.block_size) - len(b) for g, b in zip(self.groups, hit.blocks, strict=True)]
        try:
            fresh = pool.allocate(sum(new))
        except Exception:
            pool.free(kept)
            raise
        finally:
            pool.free(sources)
        parts = np.split(fresh, np.cumsum(new)[:-1])
        block_ids = [
            np.concatenate([np.array(old, np.int32), part]) for old, part in zip(hit.blocks, parts, strict=True)
        ]
        try:
            row = self.states.add_request(replace(request, block_ids=block_ids, num_computed_tokens=hit.num_tokens))
        except Exception:
            pool.free(fresh)
            pool.free(kept)
            raise
        tip = hit.path[-1] if hit.path else self.tree.root
        self.tree.hold(tip)
        self._tips[row] = tip
        self._keys[row] = keys
        self._num_published[row] = len(hit.path)
        for live, blocks in zip(self._first_live, hit.blocks, strict=True):
            live[row] = next((i for i, b in enumerate(blocks) if b), len(blocks))
        return row, (list(hit.copy_from), [int(p[0]) for p in parts] if hit.copy_from else [])

    # -- growth: the hot path, arrays only ------------------------------------------------------------------------

    def wanted(self, rows: Rows, num_tokens: npt.NDArray[np.integer]) -> tuple[Counts, ...]:
        """Blocks that each of these rows lacks to hold num_tokens[i] tokens, one array [B] a group."""
        return tuple(
            np.maximum(-(-num_tokens // t.tokens_per_block) - t.num_blocks[rows], 0).astype(np.int64)
            for t in self.states.block_tables
        )

    def grow(self, rows: Rows, wanted: tuple[Counts, ...]) -> None:
        """Append the wanted blocks. CapacityError when fewer are free, and nothing changes."""
        totals = [int(w.sum()) for w in wanted]
        if not any(totals):
            return
        fresh = self.pool.allocate(sum(totals))
        start = 0
        for table, want, total in zip(self.states.block_tables, wanted, totals, strict=True):
            some = np.flatnonzero(want)
            count, held = want[some], table.num_blocks[rows[some]]
            within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
            table.table[np.repeat(rows[some], count), np.repeat(held, count) + within] = fresh[start : start + total]
            table.num_blocks[rows[some]] = held + count
            start += total

    def drop_dead(self, rows: Rows, num_computed: npt.NDArray[np.integer]) -> None:
        """Give back the blocks that no token from ``num_computed`` on can read; their entries become null."""
        for g in self._windowed:
            live, table = self._first_live[g], self.states.block_tables[g].table
            needed = self.groups[g].first_needed(num_computed)
            dying = np.flatnonzero(needed > live[rows])
            if not dying.size:
                continue
            chosen, start = rows[dying], live[rows[dying]]
            count = needed[dying] - start
            within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            at = np.repeat(chosen, count), np.repeat(start, count) + within
            dead = table[at]
            table[at] = 0
            ids = self.states.block_tables[g]
            ids.content_id[chosen] = ids.ids.take(len(chosen)) + np.arange(len(chosen))
            live[chosen] = needed[dying]
            self.pool.free(dead)

    # -- after a step, and at the end -------------------------------------------------------------------------------

    def publish(self, row: int) -> None:
        """Make the row's computed whole blocks hittable, and the computed tokens after them by copy."""
        states, size = self.states, self.tree.block_size
        computed = int(min(states.num_computed_tokens[row], states.num_tokens[row]))
        done = int(self._num_published[row])
        if not self.prefix_caching or done == UNPUBLISHABLE:
            return
        data = states.token_ids[row, done * size : computed].tobytes()
        for i in range(done, computed // size):
            begin = 4 * (i - done) * size
            if not self._publish_node(row, i, data[begin : begin + 4 * size]):
                self._num_published[row] = UNPUBLISHABLE
                return
        if self.partial_reuse and computed % size:
            self._publish_partial(row, computed // size, data[-4 * (computed % size) :])

    def free(self, row: int, *, publish: bool = True) -> None:
        """Give the row's blocks back, tail first; the caller then removes the request.

        publish: what the row computed can be hit from now on. False: it may not have been computed.
        """
        if publish:
            self.publish(row)
        tip = self._tips[row]
        if tip is not None:
            self.tree.release(tip)
        self._tips[row] = None
        self._keys[row] = NO_KEYS
        self._num_published[row] = 0
        for table, live in zip(self.states.block_tables, self._first_live, strict=True):
            self.pool.free(table.table[row, live[row] : table.num_blocks[row]][::-1])
            live[row] = 0

    def reset(self) -> bool:
        """Forget all cached content. False, and nothing changes, while a request holds blocks."""
        if self.pool.num_used:
            return False
        for block, (node, group) in self._content.items():
            node.blocks.pop(group, None)
            self.pool.is_cached[block] = False
            self.tree.release(node)
        self._content.clear()
        self.version += 1
        if self._on_event is not None:
            self._on_event(CacheCleared())
        return True

    # -- content -----------------------------------------------------------------------------------------------------

    def _hit_blocks(self, path: list[PrefixNode], full: int) -> tuple[tuple[int, ...], ...]:
        out = []
        for g, (group, ratio) in enumerate(zip(self.groups, self._node_blocks, strict=True)):
            first = int(group.first_needed(np.array([full]))[0])
            count = full // group.block_size
            ends = (path[(k + 1) * ratio - 1].blocks for k in range(first, count))
            out.append((0,) * min(first, count) + tuple(blocks[g][0] for blocks in ends))
        return tuple(out)

    def _partial(
        self, path: list[PrefixNode], full: int, data: bytes, limit: int, keys: BlockKeys
    ) -> tuple[int, tuple[int, ...]]:
        size = self.tree.block_size
        i = full // size
        room = limit - full
        if not self.partial_reuse or room <= 0:
            return 0, ()
        parent = path[i - 1] if i else self.tree.root
        wanted = data[4 * full : 4 * min(full + size, limit)]
        best = self.tree.best_partial(parent, wanted, keys.get(i, ()))
        if best is None or any(g not in best[0].blocks for g in range(len(self.groups))):
            return 0, ()
        return best[1], tuple(best[0].blocks[g][0] for g in range(len(self.groups)))

    def _publish_node(self, row: int, i: int, tokens: bytes) -> bool:
        tip = self._tips[row]
        assert tip is not None
        node = self.tree.intern(tip, tokens, self._keys[row].get(i, ()))
        if node is None:  # its hash belongs to other content: nothing after it can be found either
            return False
        self.tree.hold(node)
        self.tree.release(tip)
        self._tips[row] = node
        self._num_published[row] = i + 1
        for g, ratio in enumerate(self._node_blocks):
            if (i + 1) % ratio == 0:
                self._register(int(self.states.block_tables[g].table[row, i // ratio]), node, g)
        return True

    def _publish_partial(self, row: int, i: int, tokens: bytes) -> None:
        tip = self._tips[row]
        assert tip is not None
        node = self.tree.find(tip, tokens, self._keys[row].get(i, ()))
        known = self.tree.best_partial(tip, tokens, self._keys[row].get(i, ()))
        if node is None and known is not None and known[1] * 4 == len(tokens):
            return  # a longer block begins with these tokens
        node = node or self.tree.intern(tip, tokens, self._keys[row].get(i, ()))
        if node is not None and not node.blocks:
            self.tree.hold(node)
            for g, table in enumerate(self.states.block_tables):
                self._register(int(table.table[row, i]), node, g)
            self.tree.release(node)

    def _register(self, block: int, node: PrefixNode, group: int) -> None:
        if block == 0 or self._content.get(block) == (node, group):
            return
        if block in self._content:
            self._unregister(block)
        self._content[block] = node, group
        self.pool.is_cached[block] = True
        node.blocks.setdefault(group, []).append(block)
        self.tree.hold(node)
        self.version += 1
        if self._on_event is not None and node.parent is not None:
            tokens = tuple(np.frombuffer(node.tokens, np.int32).tolist())
            self._on_event(BlockStored(node.hash, node.parent.hash, tokens, block, group))

    def _unregister(self, block: int) -> None:
        node, group = self._content.pop(block)
        node.blocks[group].remove(block)
        if not node.blocks[group]:
            del node.blocks[group]
        self.version += 1
        if self._on_event is not None:
            self._on_event(BlockRemoved(node.hash, block, group))
        self.tree.release(node)

    def _forget(self, blocks: BlockIds) -> None:
        for block in blocks.tolist():
            self._unregister(block)
