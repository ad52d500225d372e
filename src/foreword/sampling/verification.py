"""Speculative verification: keep the drafts that the model would have chosen itself.

A draft at position p is accepted if it equals the token that the target draws at p with its own noise. The noise
depends on (seed, p, token) alone, so the output is, token for token, the output without speculation: greedy or
sampled, its distribution is the target's by construction. A draft d is accepted with probability p_target(d), as in
rejection sampling against a deterministic drafter. A drafter that draws with the same noise has a higher acceptance
rate, because its noise and the target's are equal.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32


def accepted_tokens(drawn: I32, drafts: I32, cu_num_logits: I32, width: int) -> I32:
    """Return the tokens to commit, int32 [B, width], padded with −1.

    drawn: [L], the target's token at each logit row; drafts: [L − B], request by request; request b owns logit rows
    cu_num_logits[b] … cu_num_logits[b + 1] − 1, one more than it has drafts.

        for b: for j: out[b, j] = drawn[b][j]; stop after the first j that has no draft or whose draft differs
    """
    starts, counts = cu_num_logits[:-1], np.diff(cu_num_logits)
    column = np.arange(width)
    at = np.minimum(starts[:, None] + column, len(drawn) - 1)
    tokens = drawn[at]
    has_draft = column < counts[:, None] - 1
    draft_at = starts[:, None] - np.arange(len(starts))[:, None] + column
    draft = drafts[np.minimum(draft_at, max(len(drafts) - 1, 0))] if len(drafts) else np.full_like(tokens, -1)
    matches = has_draft & (draft == tokens)
    reached = np.ones_like(matches)
    reached[:, 1:] = np.logical_and.accumulate(matches, axis=1)[:, :-1]
    return np.where(reached & (column < counts[:, None]), tokens, -1).astype(np.int32)
