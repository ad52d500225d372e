"""Map nodes to the physical blocks that hold their content, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from foreword.arrays import I32, I64, Bools, Ints
from foreword.cache.events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from foreword.cache.keys import adapter_of
from foreword.cache.prefix import NO_EXTRA, HashFunction, PrefixNode, PrefixTree


class Changes:
    """``with changes:`` around a change of the content. is_torn: whether a change raised before its end."""

    __slots__ = ("_num_open",)

    def __init__(self) -> None:
        self._num_open = 0

    @property
    def is_torn(self) -> bool:
        """Call this outside of every change."""
        return self._num_open > 0

    def __enter__(self) -> None:
        self._num_open += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._num_open -= 1

    def forget(self) -> None:
        """Record that the content was cleared."""
        self._num_open = 0


class CachedContent:
    """The tree of known prefixes, and the blocks of the pool whose content a lookup can find in it.

    changes: entered around every change of tree and content, so that an interrupted one is noticed.
    node_blocks[g]: tree blocks that one block of group g covers; it is kept at the last of them.
    is_cached: bool [num_blocks], the pool's. version: grows whenever the answer of a lookup may change.
    """

    def __init__(
        self,
        block_size: int,
        node_blocks: Sequence[int],
        is_cached: Bools,
        *,
        hash_function: HashFunction,
        on_event: Callable[[CacheEvent], None] | None,
    ) -> None:
        self.tree = PrefixTree(
            block_size, len(node_blocks), on_cut=self._move, hash_function=None if on_event is None else hash_function
        )
        self.version = 0
        self.changes = Changes()
        self._node_blocks = tuple(node_blocks)
        self._is_cached = is_cached
        self._on_event = on_event
        # Where the content of a cached block is: node; block of the sequence · number of groups + group.
        self._serial = np.zeros(len(is_cached), np.int64)
        self._place = np.zeros(len(is_cached), np.int64)

    def record(self, node: PrefixNode, first: int, end: int, group: int, table_row: I32) -> None:
        """Record that a row's blocks of a group hold blocks first … end − 1 of the node from now on. Null blocks are
        skipped.
        """
        ratio = self._node_blocks[group]
        ids = table_row[first // ratio : end // ratio].astype(np.intp)
        if not len(ids):
            return
        index = np.arange(first // ratio * ratio + ratio - 1, end // ratio * ratio, ratio)
        known = self._is_cached[ids]
        if np.count_nonzero(known):
            other = (self._serial[ids] != node.serial) | (self._place[ids] != self._places(index, group))
            if (known & other).any():
                self.remove(ids[known & other])
            ids, index = ids[~known | other], index[~known | other]
        if np.count_nonzero(ids) < len(ids):  # below a window
            index, ids = index[ids != 0], ids[ids != 0]
        self.hold(node, group, ids, index)

    def hold(self, node: PrefixNode, group: int, ids: I64, index: I64, *, is_passing: bool = False) -> None:
        """Record that these blocks, which have no content, hold the blocks ``index`` of the node from now on.
        is_passing: see `BlockStored`.
        """
        at = index - node.start
        held = node.blocks[group][at]
        if np.count_nonzero(held):  # the same content is cached already
            taken = held != 0
            for block, i in zip(ids[taken].tolist(), index[taken].tolist(), strict=True):
                node.spares.setdefault((group, i), []).append(block)
            node.blocks[group][at[~taken]] = ids[~taken]
        else:
            node.blocks[group][at] = ids
        node.num_blocks += len(ids)
        self._serial[ids] = node.serial
        self._place[ids] = self._places(index, group)
        self._is_cached[ids] = True
        self.version += 1
        if self._on_event is not None:
            adapter = adapter_of(self.tree.first_of(node).extra)
            for block, i in zip(ids.tolist(), index.tolist(), strict=True):
                size = 4 * self.tree.block_size
                tokens = node.tokens[(i - node.start) * size : (i - node.start + 1) * size]
                names, ids_of_block = self.tree.name(node, i), tuple(np.frombuffer(tokens, np.int32).tolist())
                extra = node.extra if i == node.start else NO_EXTRA
                self._on_event(BlockStored(*names, ids_of_block, block, group, extra, adapter, is_passing))

    def remove(self, blocks: Ints, *, is_replaced: bool = False) -> None:
        """Forget the content of these cached blocks. is_replaced: see `BlockRemoved`."""
        at = blocks.astype(np.intp)
        with self.changes:
            serials = self._serial[at]
            lasts = (serials[1:] != serials[:-1]).nonzero()[0].tolist() if len(at) > 1 else ()
            for before, last in pairwise((-1, *lasts, len(at) - 1)):
                node = self.tree.nodes[int(serials[last])]
                self._remove_from(node, at[before + 1 : last + 1], is_replaced)
                self.tree.prune(node)
            self._is_cached[at] = False
            self.version += 1

    def detach_all(self) -> None:
        """Forget every row, and all content if a change of it was interrupted."""
        if self.changes.is_torn:
            self.clear()
        with self.changes:
            self.tree.detach_all()
            self.version += 1

    def clear(self) -> None:
        """Forget the content of every block, and every row."""
        self.tree.clear()
        self._is_cached[:] = False
        self.changes.forget()
        self.version += 1
        if self._on_event is not None:
            self._on_event(CacheCleared())

    def _places(self, index: I64, group: int) -> I64:
        return index if len(self._node_blocks) == 1 else index * len(self._node_blocks) + group

    def _remove_from(self, node: PrefixNode, blocks: I64, is_replaced: bool) -> None:
        place = self._place[blocks]
        node.num_blocks -= len(blocks)
        if len(node.blocks) == 1 and not node.spares and self._on_event is None:
            place -= node.start
            node.blocks[0][place] = 0
            return
        index, group = np.divmod(place, len(self._node_blocks))
        if self._on_event is not None:
            for block, i, g in zip(blocks.tolist(), index.tolist(), group.tolist(), strict=True):
                self._on_event(BlockRemoved(self.tree.name(node, i)[0], block, g, is_replaced))
        if node.spares:
            for block, i, g in zip(blocks.tolist(), index.tolist(), group.tolist(), strict=True):
                spares = node.spares.get((g, i), [])
                if node.blocks[g][i - node.start] == block:
                    node.blocks[g][i - node.start] = spares.pop(0) if spares else 0
                else:
                    spares.remove(block)
                if not spares:
                    node.spares.pop((g, i), None)
        else:
            for g, ids in enumerate(node.blocks):
                ids[index[group == g] - node.start] = 0

    def _move(self, upper: PrefixNode, lower: PrefixNode) -> None:
        """Follow the cut of a run, after which the blocks of its lower part belong to another node."""
        for ids in lower.blocks:
            self._serial[ids[ids != 0]] = lower.serial
        for spares in lower.spares.values():
            self._serial[spares] = lower.serial
