"""The prefix tree: runs of blocks that are cut where sequences diverge, and dropped when they are unused."""

import numpy as np

from foreword.cache.prefix import PrefixTree, common_tokens, hash_block


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def path_of(tree: PrefixTree, row: int, data: bytes, keys=None):
    """A row whose path is these blocks."""
    tree.attach(row, [], 0)
    tree.extend(row, data, keys or {})
    return tree.path_end(row)[0]


def shape(tree: PrefixTree) -> list[tuple[int, int]]:
    return sorted((node.start, node.end) for node in tree)


def test_a_block_is_found_only_after_its_own_prefix():
    tree = PrefixTree(2)
    path_of(tree, 0, tokens(1, 2, 3, 4))
    assert tree.walk(tokens(1, 2, 3, 4), {})[1] == 2
    assert tree.walk(tokens(3, 4), {})[1] == 0
    assert tree.walk(tokens(1, 2, 9, 4), {})[1] == 1


def test_equal_tokens_under_other_keys_are_other_content():
    tree = PrefixTree(2)
    path_of(tree, 0, tokens(1, 2, 3, 4, 5, 6), {0: (("adapter", 1),), 2: (("image", "cat", 0),)})
    walked = [
        tree.walk(tokens(1, 2, 3, 4, 5, 6), keys)[1]
        for keys in (
            {},
            {0: (("adapter", 2),)},
            {0: (("adapter", 1),)},
            {0: (("adapter", 1),), 1: (("image", "cat", 0),)},
            {0: (("adapter", 1),), 2: (("image", "cat", 0),)},
        )
    ]
    assert walked == [0, 0, 2, 1, 3]


def test_one_sequence_is_one_run_however_it_came():
    tree = PrefixTree(2)
    tree.attach(0, [], 0)
    for part in (tokens(1, 2), tokens(3, 4, 5, 6), tokens(7, 8)):
        tree.extend(0, part, {})
    assert shape(tree) == [(0, 4)]


def test_a_run_is_cut_where_sequences_part():
    tree = PrefixTree(2)
    path_of(tree, 0, tokens(1, 2, 3, 4, 5, 6))
    path_of(tree, 1, tokens(1, 2, 3, 4, 9, 9, 8, 8))
    assert shape(tree) == [(0, 2), (2, 3), (2, 4)]
    assert [tree.path_end(row)[0].tokens for row in (0, 1)] == [tokens(5, 6), tokens(9, 9, 8, 8)]
    path_of(tree, 2, tokens(1, 2, 3, 4))  # ends inside: nothing to cut
    assert len(tree) == 3
    tree.detach(0)
    assert shape(tree) == [(0, 2), (2, 4)]


def test_a_row_inside_a_run_keeps_its_place_when_the_run_is_cut():
    tree = PrefixTree(2)
    path_of(tree, 0, tokens(1, 1, 2, 2, 3, 3, 4, 4))
    path_of(tree, 1, tokens(1, 1, 2, 2, 3, 3))
    path_of(tree, 2, tokens(1, 1, 2, 2, 9, 9))
    assert (tree.path_end(1)[0].start, tree.path_end(1)[0].end, tree.path_end(1)[1]) == (2, 4, 3)
    tree.detach(0)
    assert tree.walk(tokens(1, 1, 2, 2, 3, 3), {})[1] == 3


def test_names_do_not_depend_on_where_runs_are_cut():
    tree = PrefixTree(2, hash_function=hash_block)
    path_of(tree, 0, tokens(1, 2, 3, 4, 5, 6))
    before = [tree.name(tree.path_end(0)[0], i) for i in range(3)]
    path_of(tree, 1, tokens(1, 2, 3, 4, 7, 7))
    upper, lower = tree.walk(tokens(1, 2, 3, 4, 5, 6), {})[0]
    assert [tree.name(upper, 0), tree.name(upper, 1), tree.name(lower, 2)] == before


def test_hashes_are_the_same_in_every_process():
    tree = PrefixTree(2, hash_function=hash_block)
    node = path_of(tree, 0, tokens(1, 2, 3, 4), {1: (("adapter", 1),)})
    assert tree.name(node, 1)[0].hex() == "6c20cb5c0ee1c1ac1706105d5fa4a055"  # little-endian


def test_the_last_row_to_leave_removes_its_path():
    tree = PrefixTree(2)
    path_of(tree, 0, tokens(1, 2, 3, 4))
    path_of(tree, 1, tokens(1, 2, 5, 5))
    tree.detach(0)
    assert shape(tree) == [(0, 1), (1, 2)]
    tree.detach(1)
    assert len(tree) == 0
    assert not tree.root.children
    tree.detach(1)  # unknown rows are none


def test_a_run_is_shortened_when_its_end_is_needed_no_more():
    tree = PrefixTree(1)
    path_of(tree, 0, tokens(*range(10)))
    path_of(tree, 1, tokens(*range(3)))
    tree.detach(0)
    assert shape(tree) == [(0, 3)]
    assert tree.walk(tokens(*range(10)), {})[1] == 3


def test_the_best_partial_match_is_the_longest_common_beginning():
    tree = PrefixTree(4)
    for row, data in enumerate((tokens(1, 2, 3, 4), tokens(1, 2, 9, 9))):
        path_of(tree, row, data)
    a, b = (tree.path_end(row)[0] for row in (0, 1))
    for node in (a, b):
        node.blocks[0][:] = 7
    assert tree.best_partial(tree.root, 0, tokens(1, 2, 3, 7), ()) == (a, 3)
    assert tree.best_partial(tree.root, 0, tokens(1, 2, 9), ()) == (b, 3)
    assert tree.best_partial(tree.root, 0, tokens(2, 2), ()) is None
    assert tree.best_partial(tree.root, 0, b"", ()) is None


def test_a_partial_match_may_lie_inside_a_run():
    tree = PrefixTree(2)
    node = path_of(tree, 0, tokens(1, 2, 3, 4, 5, 6))
    node.blocks[0][:] = [1, 2, 0]
    assert tree.best_partial(node, 1, tokens(3, 9), ()) == (node, 1)
    assert tree.best_partial(node, 1, tokens(3, 9), (("salt", "s"),)) is None
    assert tree.best_partial(node, 2, tokens(5, 6), ()) is None  # known, but no block holds it


def test_common_tokens_counts_whole_tokens():
    assert common_tokens(tokens(1, 2, 3), tokens(1, 2, 3)) == 3
    assert common_tokens(tokens(1, 2, 3), tokens(1, 2)) == 2
    assert common_tokens(tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 9, 5)) == 3
    assert common_tokens(tokens(256), tokens(512)) == 0
    assert common_tokens(tokens(1), b"") == 0
