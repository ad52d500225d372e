"""Which drafts are accepted: the vectorised rule against the loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreword.sampling import accepted_tokens


def plain(drawn: list[list[int]], drafts: list[list[int]], width: int) -> list[list[int]]:
    out = []
    for row, draft in zip(drawn, drafts, strict=True):
        kept = [row[0]]
        for j, d in enumerate(draft):
            if d != row[j]:
                break
            kept.append(row[j + 1])
        out.append(kept + [-1] * (width - len(kept)))
    return out


@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_accepted_tokens_follow_the_loop(data: st.DataObject, counts: list[int]):
    token = st.integers(0, 1)
    drafts = [data.draw(st.lists(token, min_size=k, max_size=k)) for k in counts]
    drawn = [data.draw(st.lists(token, min_size=k + 1, max_size=k + 1)) for k in counts]
    width = max(counts) + 1
    got = accepted_tokens(
        np.concatenate(drawn).astype(np.int32),
        np.concatenate(drafts).astype(np.int32),
        np.cumsum([0, *(k + 1 for k in counts)]).astype(np.int32),
        width,
    )
    assert got.tolist() == plain(drawn, drafts, width)
