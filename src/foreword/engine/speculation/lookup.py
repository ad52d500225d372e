"""Drafts from the request's own tokens: those that followed an earlier occurrence of its latest tokens."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.engine.speculation.config import SpeculationConfig


class LookupDrafter:
    """Prompt lookup ("ngram": prompt and output) or own output alone ("suffix").

    For a row with known tokens t[0 … v), searched from position a (0, or the prompt's length; after the last embedding
    of a prompt that has some):

        the match at j is the largest m ≤ max_match with t[j − m … j) = t[v − m … v) and j − m ≥ a, j < v
        take the longest match, of equal ones the one followed by most tokens (up to k), of those the latest;
        if it has min_match tokens, draft t[j … min(j + k, v))

    Array operations: O(max_match · Σ known tokens) comparisons per step, without a loop over requests.
    """

    relative_cost = 0.0

    def __init__(self, states: RequestStates, config: SpeculationConfig) -> None:
        self.states, self.config = states, config

    def propose(self, rows: I32, most: I32) -> I32:
        states, width = self.states, self.states.max_num_draft_tokens
        known = states.num_tokens[rows].astype(np.int64)
        first = states.prompt_len[rows].astype(np.int64) if self.config.method == "suffix" else np.zeros_like(known)
        longest = int(known.max())
        if states.extras.prompt_embeds and states.extras.is_embedding is not None:
            embedded = states.extras.is_embedding[rows, :longest]
            after_last = np.where(embedded.any(1), longest - embedded[:, ::-1].argmax(1), 0)
            first = np.maximum(first, after_last)
        tokens = states.token_ids[rows, :longest]
        j = np.arange(longest)
        candidate = (j >= 1) & (j < known[:, None])
        running = candidate.copy()
        match = np.zeros(tokens.shape, np.int32)
        for m in range(1, self.config.max_match + 1):
            if not (m < known).any():
                break
            wanted = tokens[np.arange(len(rows)), np.maximum(known - m, 0)]
            equal = np.zeros_like(running)
            equal[:, m:] = tokens[:, : longest - m] == wanted[:, None]
            running &= equal & (j - m >= first[:, None])
            match += running
        score = match * (width + 1) + np.minimum(known[:, None] - j, most[:, None])
        best = longest - 1 - np.where(candidate, score, -1)[:, ::-1].argmax(1)
        length = match[np.arange(len(rows)), best]
        column = np.arange(width)
        at = best[:, None] + column
        good = (length >= self.config.min_match)[:, None] & (column < most[:, None]) & (at < known[:, None])
        drafts = states.token_ids[rows[:, None], np.minimum(at, states.max_model_len - 1)]
        return np.where(good, drafts, -1).astype(np.int32)
