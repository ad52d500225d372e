"""The prefix tree: which token sequences the pool holds, found by hash and proven by comparison.

    root ── [a b c d] ── [e f g h] ── [i j k l]        one node a full block of tokens
                     └── [e f x y]                     hash = H(parent's hash, tokens, extra keys)
                     └── [e f]                         a partial block: a leaf, reused by copy

A node is found through its hash and accepted only if its parent, tokens and extra keys are the wanted ones. Since the
parent was accepted the same way, an accepted path *is* the wanted token sequence, whatever the hash function does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from hashlib import blake2b
from itertools import islice

ExtraKeys = tuple[Hashable, ...]
HashFunction = Callable[[bytes, bytes, ExtraKeys], bytes]

ROOT_HASH = b"foreword.prefix."

# A partial match is looked for among this many of the newest children that begin with the right token.
MAX_PARTIAL_CANDIDATES = 8


def hash_block(parent: bytes, tokens: bytes, extra: ExtraKeys) -> bytes:
    """H(parent, tokens, extra): 16 bytes, the same in every process for extra keys with a stable repr."""
    digest = blake2b(parent, digest_size=16)
    digest.update(tokens)
    if extra:
        digest.update(repr(extra).encode())
    return digest.digest()


class PrefixNode:
    """One block of tokens after a known prefix, and the physical blocks that hold its keys and values.

    blocks: group → blocks; more than one when several requests computed the same content. Tables are append-only, so
    duplicates are kept and any of them serves a hit. It lives while a block, a child or a request's path needs it.
    """

    __slots__ = ("blocks", "children", "extra", "hash", "num_holders", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, hash: bytes, tokens: bytes, extra: ExtraKeys) -> None:
        self.parent = parent
        self.hash = hash
        self.tokens = tokens  # int32, little or big endian as the machine
        self.extra = extra
        self.blocks: dict[int, list[int]] = {}
        self.children: dict[bytes, dict[bytes, PrefixNode]] = {}  # first token → hash → node, oldest first
        self.num_holders = 0


class PrefixTree:
    """Interned prefixes. ``block_size``: tokens of a full node."""

    def __init__(self, block_size: int, hash_function: HashFunction = hash_block) -> None:
        self.block_size = block_size
        self.root = PrefixNode(None, ROOT_HASH, b"", ())
        self._hash = hash_function
        self._nodes: dict[bytes, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def find(self, parent: PrefixNode, tokens: bytes, extra: ExtraKeys = ()) -> PrefixNode | None:
        """The node of exactly these tokens and keys after ``parent``, or None."""
        node = self._nodes.get(self._hash(parent.hash, tokens, extra))
        return node if node is not None and _is(node, parent, tokens, extra) else None

    def intern(self, parent: PrefixNode, tokens: bytes, extra: ExtraKeys = ()) -> PrefixNode | None:
        """Find or make the node. None if other content owns its hash: the block then stays out of the cache.

        A new node has no holder: give it one (`hold`, or a block) or it stays for ever.
        """
        key = self._hash(parent.hash, tokens, extra)
        node = self._nodes.get(key)
        if node is not None:
            return node if _is(node, parent, tokens, extra) else None
        node = self._nodes[key] = PrefixNode(parent, key, tokens, extra)
        parent.num_holders += 1
        parent.children.setdefault(tokens[:4], {})[key] = node
        return node

    def best_partial(self, parent: PrefixNode, tokens: bytes, extra: ExtraKeys) -> tuple[PrefixNode, int] | None:
        """The child of ``parent`` that shares the longest beginning with ``tokens``, and how many tokens that is."""
        best: tuple[PrefixNode, int] | None = None
        newest = reversed(parent.children.get(tokens[:4], {}).values())
        for node in islice(newest, MAX_PARTIAL_CANDIDATES):
            if node.extra == extra and node.blocks:
                shared = common_tokens(node.tokens, tokens)
                if best is None or shared > best[1]:
                    best = node, shared
        return best

    def hold(self, node: PrefixNode) -> None:
        node.num_holders += 1

    def release(self, node: PrefixNode) -> None:
        """One holder fewer; a node nobody needs is forgotten, and then perhaps its parent."""
        node.num_holders -= 1
        while node.num_holders == 0 and node.parent is not None:
            parent = node.parent
            del self._nodes[node.hash]
            siblings = parent.children[node.tokens[:4]]
            del siblings[node.hash]
            if not siblings:
                del parent.children[node.tokens[:4]]
            parent.num_holders -= 1
            node = parent


def common_tokens(a: bytes, b: bytes) -> int:
    """How many int32 tokens two sequences share from the start."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    low, high = 0, size // 4  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: 4 * middle] == b[: 4 * middle]:
            low = middle
        else:
            high = middle
    return low


def _is(node: PrefixNode, parent: PrefixNode, tokens: bytes, extra: ExtraKeys) -> bool:
    return node.parent is parent and node.tokens == tokens and node.extra == extra
