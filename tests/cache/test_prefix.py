"""The prefix tree: exact identity of a prefix, whatever the hash function."""

from __future__ import annotations

import numpy as np

from foreword.cache.prefix import PrefixTree, common_tokens


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def grown(tree: PrefixTree, *blocks: bytes):
    """Intern a path of blocks, with a pretended physical block on each node."""
    node = tree.root
    for i, block in enumerate(blocks):
        node = tree.intern(node, block)
        node.blocks.setdefault(0, []).append(i + 1)
        tree.hold(node)
    return node


def test_a_block_is_found_only_after_its_own_prefix():
    tree = PrefixTree(2)
    grown(tree, tokens(1, 2), tokens(3, 4))
    first = tree.find(tree.root, tokens(1, 2))
    assert tree.find(first, tokens(3, 4)) is not None
    assert tree.find(tree.root, tokens(3, 4)) is None


def test_equal_tokens_under_other_keys_are_other_content():
    tree = PrefixTree(2)
    node = tree.intern(tree.root, tokens(1, 2), (("adapter", 1),))
    assert node is not None
    assert tree.find(tree.root, tokens(1, 2)) is None
    assert tree.find(tree.root, tokens(1, 2), (("adapter", 2),)) is None
    assert tree.find(tree.root, tokens(1, 2), (("adapter", 1),)) is node


def test_a_collision_never_returns_other_content():
    tree = PrefixTree(2, hash_function=lambda parent, block, extra: b"the same for all")
    first = grown(tree, tokens(1, 2))
    assert tree.find(tree.root, tokens(1, 2)) is first
    assert tree.find(tree.root, tokens(9, 9)) is None
    assert tree.find(first, tokens(1, 2)) is None
    assert tree.intern(tree.root, tokens(9, 9)) is None


def test_hashes_are_the_same_in_every_process():
    tree = PrefixTree(2)
    node = tree.intern(tree.intern(tree.root, tokens(1, 2)), tokens(3, 4), (("adapter", 1),))
    assert node.hash.hex() == "6c20cb5c0ee1c1ac1706105d5fa4a055"  # little-endian


def test_releasing_the_last_block_of_a_path_forgets_the_path():
    tree = PrefixTree(2)
    leaf = grown(tree, tokens(1, 2), tokens(3, 4))
    parent = leaf.parent
    parent.blocks.clear()
    tree.release(parent)
    assert len(tree) == 2  # the leaf still needs its parent's identity
    leaf.blocks.clear()
    tree.release(leaf)
    assert len(tree) == 0
    assert not tree.root.children
    assert tree.root.num_holders == 0


def test_the_best_partial_match_is_the_longest_common_beginning():
    tree = PrefixTree(4)
    a = grown(tree, tokens(1, 2, 3, 4))
    b = grown(tree, tokens(1, 2, 9, 9))
    assert tree.best_partial(tree.root, tokens(1, 2, 3, 7), ()) == (a, 3)
    assert tree.best_partial(tree.root, tokens(1, 2, 9), ()) == (b, 3)
    assert tree.best_partial(tree.root, tokens(2, 2), ()) is None
    assert tree.best_partial(tree.root, b"", ()) is None


def test_common_tokens_counts_whole_tokens():
    assert common_tokens(tokens(1, 2, 3), tokens(1, 2, 3)) == 3
    assert common_tokens(tokens(1, 2, 3), tokens(1, 2)) == 2
    assert common_tokens(tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 9, 5)) == 3
    assert common_tokens(tokens(256), tokens(512)) == 0
    assert common_tokens(tokens(1), b"") == 0
