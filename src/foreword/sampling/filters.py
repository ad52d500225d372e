"""Which tokens may be drawn: min-p, then top-k, then top-p over the tokens that top-k keeps."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I64, Floats


def kept_tokens(logits: Floats, *, top_k: int, top_p: float, min_p: float) -> I64:
    """The kept token ids, ascending, of one row of temperature-scaled logits [V]. With p = softmax(logits):

        min_p   keep p ≥ min_p · max p
        top_k   keep the k largest of these; of equal ones the lower ids (0: all)
        top_p   renormalise; keep the smallest set, taken in descending order with lower ids first among equals, whose
                probability reaches top_p. At least one token is kept.

    Tokens of probability 0 (logit −inf) are never kept.
    """
    top = logits.max()
    threshold = top + np.log(min_p) if min_p > 0 else -np.inf
    if top_k > 0:
        threshold = max(threshold, np.partition(logits, len(logits) - top_k)[len(logits) - top_k])
    kept = np.flatnonzero((logits >= threshold) & (logits > -np.inf))
    if 0 < top_k < len(kept):  # more than k are at least the k-th value
        kept = kept[np.argsort(-logits[kept], kind="stable")[:top_k]]
        kept.sort()
    return kept if top_p >= 1.0 else _nucleus(logits, kept, top, top_p)


def _nucleus(logits: Floats, kept: I64, top: float, top_p: float) -> I64:
    p = np.exp(logits[kept].astype(np.float64) - top)
    wanted = top_p * p.sum()
    size = min(1024, len(p))
    while True:  # the nucleus is usually small: sort the largest few, and more only if needed
        if size == len(p):
            some = np.arange(size)
        else:
            least = np.partition(p, len(p) - size)[len(p) - size]
            some = np.flatnonzero(p > least)  # without the ties of the smallest, so the order is that of a full sort
        order = some[np.argsort(-p[some], kind="stable")]
        reached = np.cumsum(p[order])
        if size == len(p) or (len(reached) and reached[-1] >= wanted):
            count = int(np.searchsorted(reached, wanted)) + 1
            return np.sort(kept[order[:count]])
        size = min(size * 8, len(p))
