"""Extra keys of a prefix: blocks are equal exactly if all that their keys and values are computed from is equal."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.cache import prefix_keys

SIZE = 4


def inputs(embeds=None, is_token=None, positions=None, delta=0):
    found = {}
    if embeds is not None:
        found |= {"prompt_embeds": np.asarray(embeds, np.float32), "prompt_is_token_id": np.asarray(is_token, np.bool_)}
    if positions is not None:
        found |= {"mrope_positions": np.asarray(positions, np.int32), "mrope_delta": delta}
    return found


def test_tokens_and_text_positions_have_no_keys():
    rows = np.ones((9, 2))
    plain = inputs(rows, [True] * 9, np.tile(np.arange(9), (3, 1)))
    assert prefix_keys(SIZE, inputs=plain, max_len=20) == prefix_keys(SIZE, inputs={}, max_len=20) == {}


def test_an_embedding_is_not_the_token_beside_it():
    """Equal ids and vectors, of which others are read: [token, vector] and [vector, token]."""
    first, second = (prefix_keys(SIZE, inputs=inputs(np.ones((2, 3)), m), max_len=9) for m in ([1, 0], [0, 1]))
    assert first != second
    assert first.keys() == second.keys() == {0}


def test_positions_have_equal_keys_however_many_of_them_are_in_the_table():
    positions = np.array([[0, 1, 2, 2, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    positions[:, 5:] = 3 + np.arange(4)
    short = prefix_keys(SIZE, inputs=inputs(positions=positions[:, :5], delta=-2), max_len=24)
    assert short == prefix_keys(SIZE, inputs=inputs(positions=positions, delta=-2), max_len=24)
    assert sorted(short) == list(range(6))
    longer = prefix_keys(SIZE, inputs=inputs(positions=positions, delta=-2), max_len=40)
    assert {block: longer[block] for block in short} == short


def content(given, length, max_len):
    """Return what each position of up to max_len is computed from, apart from its token."""
    embeds, mask = given.get("prompt_embeds"), given.get("prompt_is_token_id")
    table, delta = given.get("mrope_positions"), given.get("mrope_delta", 0)
    for p in range(-(-max_len // SIZE) * SIZE):
        vector = None if embeds is None or p >= length or mask[p] else embeds[p].tobytes()
        known = table is not None and p < table.shape[1]
        at = table[:, p].tolist() if known else [p + delta] * 2
        yield vector, tuple(at)


def some(random, length):
    mask = [random.random() < 0.6 for _ in range(length)]
    rows = [[float(random.randint(0, 1))] for _ in range(length)]
    n = random.randint(0, length)
    start = random.randint(0, n)
    positions = np.tile(np.arange(n), (2, 1))
    positions[:, start:] = [[random.randint(start, start + 1) + i // 2 * random.randint(0, 1) for i in range(n - start)]
                            for _ in range(2)]  # fmt: skip
    delta = random.choice([0, 0, 1])
    return {
        **(inputs(rows, mask) if random.random() < 0.6 else {}),
        **(inputs(positions=positions, delta=delta) if random.random() < 0.6 else {}),
    }


@given(st.integers(0, 2**32))
def test_blocks_have_equal_keys_exactly_if_their_content_is_equal(seed):
    random = Random(seed)
    length, max_len = random.randint(1, 9), 12
    a, b = some(random, length), some(random, length)
    shared = random.choice([(), ("prompt_embeds", "prompt_is_token_id"), ("mrope_positions", "mrope_delta")])
    b |= {key: a[key] for key in shared if key in a}
    ours, theirs = (prefix_keys(SIZE, inputs=given, max_len=max_len) for given in (a, b))
    contents = [list(content(given, length, max_len)) for given in (a, b)]
    for block in range(3):
        span = slice(block * SIZE, (block + 1) * SIZE)
        same = contents[0][span] == contents[1][span]
        assert (ours.get(block) == theirs.get(block)) == same
