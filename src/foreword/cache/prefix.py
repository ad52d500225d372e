"""The prefix tree of the token sequences that the pool holds. Equality is determined by comparison of tokens.

    root ── [a b c d | e f g h | i j k l] ── [m n o p]     a node is a run of whole blocks, one after the other
                                          └─ [m n x y | …]
                                          └─ [m n]         a partial block: a leaf, reused by copy

A run is cut where two sequences differ, so the work of a lookup is a comparison of bytes for each of the few runs on
its path, however many blocks they have. A child is found by its first block and its extra keys. Equal content is found
by comparing tokens; hashes only name blocks for a process that mirrors the cache (`foreword.cache.events`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from foreword.arrays import I32
from foreword.hashes import blake2b

ExtraKeys = tuple[Hashable, ...]
BlockKeys = Mapping[int, ExtraKeys]
HashFunction = Callable[[bytes, bytes, ExtraKeys], bytes]
Span = tuple["PrefixNode", int, int]

ROOT_HASH = b"foreword.prefix."
NO_EXTRA: ExtraKeys = ()

# A partial match is looked for among this many of the newest children that begin with the right token.
MAX_PARTIAL_CANDIDATES = 8


def hash_block(parent: bytes, tokens: bytes, extra: ExtraKeys) -> bytes:
    """Return H(parent, tokens, extra), 16 bytes, the same in every process for extra keys with a stable repr."""
    digest = blake2b(parent, digest_size=16)
    digest.update(tokens)
    if extra:
        digest.update(repr(extra).encode())
    return digest.digest()


class Forgotten:
    """The last ``size`` blocks that left the tree, by which a miss is explained."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._seen: dict[int, None] = {}

    def record(self, index: int, before: bytes, tokens: bytes, extra: ExtraKeys, first: ExtraKeys) -> None:
        """Record that block ``index`` of a sequence, after the block ``before``, was forgotten. first: the keys of
        block 0, since equal tokens under another salt or adapter are other content.
        """
        self._seen[hash((index, before, tokens, extra, first))] = None
        if len(self._seen) > self._size:
            del self._seen[next(iter(self._seen))]

    def has(self, index: int, before: bytes, tokens: bytes, extra: ExtraKeys, first: ExtraKeys) -> bool:
        """Return whether this block was forgotten."""
        return hash((index, before, tokens, extra, first)) in self._seen

    def clear(self) -> None:
        self._seen.clear()


class PrefixNode:
    """Blocks start … end − 1 of some sequences that are equal up to there.

    tokens: int32, little or big endian as the machine. extra: the keys of its first block; a block with keys is a node
    of its own. first_extra: the keys of the first block of its sequences. blocks[g][i]: the physical block of group g
    with the content of block start + i, 0 for none. spares: (group, block index) → further physical blocks of equal
    content, oldest first. rows: the requests whose path ends in it. A node is kept while it has a physical block, a
    child or a row.
    """

    __slots__ = (
        "blocks", "children", "end", "extra", "first_extra", "hashes", "num_blocks", "parent", "rows", "serial",
        "spares", "start", "tokens",
    )  # fmt: skip

    def __init__(
        self, parent: PrefixNode | None, serial: int, start: int, end: int, tokens: bytes, extra: ExtraKeys
    ) -> None:
        self.parent = parent
        self.serial = serial
        self.start, self.end = start, end
        self.tokens = tokens
        self.extra = extra
        self.first_extra: ExtraKeys = extra if parent is None or parent.parent is None else parent.first_extra
        self.blocks: list[I32] = []
        self.spares: dict[tuple[int, int], list[int]] = {}
        self.num_blocks = 0  # physical blocks, spares included
        self.hashes: list[bytes] = []
        self.children: dict[bytes, dict[tuple[bytes, ExtraKeys], PrefixNode]] = {}  # by first token, oldest first
        self.rows: set[int] = set()

    def has_block(self, index: int) -> bool:
        """Return whether any group has the content of block ``index``."""
        return any(ids[index - self.start] for ids in self.blocks)


class PrefixTree:
    """Token sequences in blocks of ``block_size`` tokens, and where in it the path of each live row ends.

    on_cut: called with (upper part, lower part) of each run that is cut. hash_function: names blocks; None: no names.
    """

    def __init__(
        self,
        block_size: int,
        num_groups: int = 1,
        *,
        on_cut: Callable[[PrefixNode, PrefixNode], None] | None = None,
        hash_function: HashFunction | None = None,
    ) -> None:
        self.block_size = block_size
        self.nodes: dict[int, PrefixNode] = {}  # all but the root, by serial
        self.forgotten = Forgotten()
        self._bytes = 4 * block_size
        self._num_groups = num_groups
        self._on_cut = on_cut
        self._hash = hash_function
        self._serial = 0
        self._path_ends: dict[int, tuple[PrefixNode, int]] = {}  # row → the node its path ends in, and its whole blocks
        self.root = PrefixNode(None, 0, 0, 0, b"", NO_EXTRA)
        self.root.hashes = [ROOT_HASH]

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self.nodes.values())

    def bytes_of(self, num_blocks: int) -> int:
        """Return the size of the content of blocks."""
        return num_blocks * self._bytes

    # -- reading ---------------------------------------------------------------------------------------------------

    def walk(self, data: bytes, keys: BlockKeys) -> tuple[list[PrefixNode], int]:
        """Return the runs that ``data`` (int32) begins with, and the number of whole blocks that they cover. The last
        run may match in part.
        """
        path: list[PrefixNode] = []
        node, at, end = self.root, 0, len(data) // self._bytes
        while at == node.end and at < end:
            extra = keys.get(at, NO_EXTRA)
            child = self._child(node, self._blocks(data, at), extra)
            if child is None:
                break
            path.append(child)
            at += self._common(child, at, data, 0, end, keys)
            node = child
        return path, at

    def node_at(self, path: Sequence[PrefixNode], num_blocks: int) -> PrefixNode:
        """Return the node on a path in which its first ``num_blocks`` blocks end."""
        return next(node for node in path if num_blocks <= node.end) if num_blocks else self.root

    def best_partial(self, node: PrefixNode, at: int, tokens: bytes, extra: ExtraKeys) -> tuple[PrefixNode, int] | None:
        """Return, of the blocks that follow block at − 1 of ``node``, the one with the longest common prefix with
        ``tokens``.

        Returns the node it is in (its first block, or block ``at`` of ``node`` itself) and the length of that prefix.
        """
        best: tuple[PrefixNode, int] | None = None
        for other in self._following(node, at, tokens[:4]):
            if (other.extra if other is not node else NO_EXTRA) == extra and other.has_block(at):
                shared = common_tokens(self._blocks(other.tokens, at - other.start), tokens)
                if shared and (best is None or shared > best[1]):
                    best = other, shared
        return best

    def name(self, node: PrefixNode, index: int) -> tuple[bytes, bytes]:
        """Return the hashes of block ``index`` of a node and of the prefix before it."""
        at = index - node.start
        before = node.hashes[at - 1] if at or node.parent is None else node.parent.hashes[-1]
        return node.hashes[at], before

    def first_of(self, node: PrefixNode) -> PrefixNode:
        """Return the run with which a node's sequences begin."""
        while node.parent is not None and node.parent is not self.root:
            node = node.parent
        return node

    # -- rows ------------------------------------------------------------------------------------------------------

    def attach(self, row: int, path: Sequence[PrefixNode], num_blocks: int) -> None:
        """Make the first ``num_blocks`` blocks of this path the path of the row."""
        self._place(row, self.node_at(path, num_blocks), num_blocks)

    def path_end(self, row: int) -> tuple[PrefixNode, int]:
        """Return the node in which the row's path ends, and the number of whole blocks of the path."""
        return self._path_ends[row]

    def node_of(self, row: int, index: int) -> PrefixNode:
        """Return the node on the row's path that contains block ``index``. The path must reach this block."""
        node, _ = self._path_ends[row]
        while index < node.start:
            assert node.parent is not None
            node = node.parent
        return node

    def detach(self, row: int) -> None:
        """Forget the row and the nodes that only it needed. Do nothing for an unknown row."""
        if row in self._path_ends:
            node, _ = self._path_ends.pop(row)
            node.rows.discard(row)
            self.prune(node)

    def extend(self, row: int, data: bytes, keys: BlockKeys) -> list[Span]:
        """Extend the row's path by the whole blocks of ``data``. Return the spans (node, first block, end) that contain
        them.
        """
        node, at = self._path_ends[row]
        begin, end = at, at + len(data) // self._bytes
        spans: list[Span] = []
        while at < end:
            extra = keys.get(at, NO_EXTRA)
            block = self._blocks(data, at - begin)
            if at < node.end:
                count = 0 if extra else self._common(node, at, data, begin, end, keys)
                if not count:
                    self._cut(node, at)
                    continue
            elif (child := self._child(node, block, extra)) is not None:
                node = child
                count = self._common(node, at, data, begin, end, keys)
            else:
                count = 1 if extra else _next_key(keys, at, end) - at
                tokens = self._blocks(data, at - begin, count)
                if node is self.root or node.children or node.extra or extra:
                    node = self._add(node, tokens, count, extra)
                else:
                    self._lengthen(node, tokens, count)
            spans.append((node, at, at + count))
            at += count
        self._path_ends[row][0].rows.discard(row)
        self._place(row, node, at)
        return spans

    def leaf(self, row: int, tokens: bytes, extra: ExtraKeys) -> PrefixNode:
        """Return the node of a partial block after the row's path, created if it is missing. Add a block to it, or call
        `prune`.
        """
        node, at = self._path_ends[row]
        if at < node.end:
            self._cut(node, at)
        return self._child(node, tokens, extra) or self._add(node, tokens, 1, extra)

    # -- forgetting ------------------------------------------------------------------------------------------------

    def prune(self, node: PrefixNode) -> None:
        """Forget a node without blocks, children and rows, and its parents likewise; shorten an unused leaf."""
        while node.parent is not None and not (node.num_blocks or node.children or node.rows):
            parent = node.parent
            before = parent.tokens[-self._bytes :] if node.start else b""
            self.forgotten.record(node.start, before, node.tokens[: self._bytes], node.extra, node.first_extra)
            del self.nodes[node.serial]
            first = node.tokens[:4]
            siblings = parent.children[first]
            del siblings[node.tokens[: self._bytes], node.extra]
            if not siblings:
                del parent.children[first]
            node = parent
        if not node.children and 2 * node.num_blocks <= node.end - node.start > 1:
            self._shorten(node)

    def detach_all(self) -> None:
        """Forget every row and the nodes that only rows needed."""
        for row in list(self._path_ends):
            self.detach(row)

    def clear(self) -> None:
        """Forget every node and every row."""
        self.nodes.clear()
        self.forgotten.clear()
        self.root.children.clear()
        self._path_ends.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: bytes, first: int, count: int = 1) -> bytes:
        """Return ``count`` blocks of some tokens, from their block ``first`` on."""
        return tokens[first * self._bytes : (first + count) * self._bytes]

    def _child(self, node: PrefixNode, block: bytes, extra: ExtraKeys) -> PrefixNode | None:
        siblings = node.children.get(block[:4])
        return None if siblings is None else siblings.get((block, extra))

    def _following(self, node: PrefixNode, at: int, first_token: bytes) -> Iterator[PrefixNode]:
        if at < node.end:
            yield node
        else:
            siblings = node.children.get(first_token)
            if siblings is not None:
                yield from islice(reversed(siblings.values()), MAX_PARTIAL_CANDIDATES)

    def _common(self, node: PrefixNode, at: int, data: bytes, begin: int, end: int, keys: BlockKeys) -> int:
        """Return the number of whole blocks from ``at`` on in which the node equals ``data``, which begins with block
        ``begin``.
        """
        stop = _next_key(keys, at, min(node.end, end))
        own = self._blocks(node.tokens, at - node.start, stop - at)
        wanted = self._blocks(data, at - begin, stop - at)
        return stop - at if own == wanted else 4 * common_tokens(own, wanted) // self._bytes

    def _place(self, row: int, node: PrefixNode, num_blocks: int) -> None:
        self._path_ends[row] = node, num_blocks
        if node is not self.root:
            node.rows.add(row)

    def _add(self, parent: PrefixNode, tokens: bytes, count: int, extra: ExtraKeys) -> PrefixNode:
        node = self._node(parent, parent.end, parent.end + count, tokens, extra)
        node.blocks = [np.zeros(count, np.int32) for _ in range(self._num_groups)]
        parent.children.setdefault(tokens[:4], {})[tokens[: self._bytes], extra] = node
        self._name(node)
        return node

    def _node(self, parent: PrefixNode, start: int, end: int, tokens: bytes, extra: ExtraKeys) -> PrefixNode:
        self._serial += 1
        node = self.nodes[self._serial] = PrefixNode(parent, self._serial, start, end, tokens, extra)
        return node

    def _lengthen(self, node: PrefixNode, tokens: bytes, count: int) -> None:
        node.tokens += tokens
        node.end += count
        node.blocks = [np.concatenate((ids, np.zeros(count, np.int32))) for ids in node.blocks]
        self._name(node)

    def _name(self, node: PrefixNode) -> None:
        """Hash the blocks of a node that have no name yet."""
        if self._hash is None or node.parent is None:
            return
        for i in range(len(node.hashes), node.end - node.start):
            before = node.hashes[-1] if i else node.parent.hashes[-1]
            node.hashes.append(self._hash(before, self._blocks(node.tokens, i), NO_EXTRA if i else node.extra))

    def _cut(self, node: PrefixNode, at: int) -> None:
        """End the node before block ``at``; a new child takes the rest."""
        n = at - node.start
        lower = self._add_lower(node, at, node.tokens[n * self._bytes :])
        node.tokens = node.tokens[: n * self._bytes]
        lower.hashes, node.hashes = node.hashes[n:], node.hashes[:n]
        lower.blocks, node.blocks = [b[n:].copy() for b in node.blocks], [b[:n].copy() for b in node.blocks]
        lower.spares = {key: ids for key, ids in node.spares.items() if key[1] >= at}
        node.spares = {key: ids for key, ids in node.spares.items() if key[1] < at}
        lower.num_blocks = sum(int(np.count_nonzero(b)) for b in lower.blocks) + sum(map(len, lower.spares.values()))
        node.num_blocks -= lower.num_blocks
        for row in [row for row in node.rows if self._path_ends[row][1] > at]:
            node.rows.discard(row)
            self._place(row, lower, self._path_ends[row][1])
        if self._on_cut is not None:
            self._on_cut(node, lower)
        self.prune(lower)

    def _add_lower(self, node: PrefixNode, at: int, tokens: bytes) -> PrefixNode:
        lower = self._node(node, at, node.end, tokens, NO_EXTRA)
        lower.children, node.children = node.children, {tokens[:4]: {(tokens[: self._bytes], NO_EXTRA): lower}}
        node.end = at
        for siblings in lower.children.values():
            for child in siblings.values():
                child.parent = lower
        return lower

    def _shorten(self, node: PrefixNode) -> None:
        """Drop the unused end of a leaf once it is half of it, so that the cost is in proportion to what is freed."""
        needed = 1 + max((self._path_ends[row][1] - 1 - node.start for row in node.rows), default=0)
        for ids in node.blocks:
            held = ids.nonzero()[0]
            if held.size:
                needed = max(needed, int(held[-1]) + 1)
        if 2 * needed > node.end - node.start:
            return
        before, block = self._blocks(node.tokens, needed - 1), self._blocks(node.tokens, needed)
        self.forgotten.record(node.start + needed, before, block, NO_EXTRA, node.first_extra)
        node.end = node.start + needed
        node.tokens = node.tokens[: needed * self._bytes]
        node.blocks = [ids[:needed].copy() for ids in node.blocks]
        del node.hashes[needed:]


def common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of int32 tokens that two sequences share from the start."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    low, high = 0, size // 4  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low


def _next_key(keys: BlockKeys, at: int, end: int) -> int:
    """Return the first block after ``at`` that has extra keys, at most ``end``."""
    return next(filter(keys.__contains__, range(at + 1, end)), end) if keys else end
