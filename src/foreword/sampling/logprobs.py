"""Log-probabilities of tokens, from the model's own logits (before any change or temperature)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability and its rank (1 is the most likely; equal tokens share the lowest rank number)."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]


def token_logprobs(logits: F32, token: int, count: int) -> TokenLogprobs:
    """The chosen token first, then the ``count`` most likely ones, from one row of logits [V].

    logprob(t) = logits[t] − log Σ exp(logits). Of equal tokens the lower id comes first.
    """
    z = logits.astype(np.float64)
    top = z.max()
    z -= top + np.log(np.exp(z - top).sum())
    chosen = {token: Logprob(float(z[token]), int((z > z[token]).sum()) + 1)}
    count = min(count, len(z))
    if count:
        least = np.partition(z, len(z) - count)[len(z) - count]
        some = np.flatnonzero(z >= least)
        for t in some[np.argsort(-z[some], kind="stable")[:count]].tolist():
            chosen.setdefault(t, Logprob(float(z[t]), int((z > z[t]).sum()) + 1))
    return chosen
