"""Drafts from the request's own tokens: those that followed an earlier occurrence of its latest tokens."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I32
from foreword.batch import RequestStates
from foreword.engine.speculation.config import SpeculationConfig
from foreword.native import available, native


class LookupDrafter:
    """Prompt lookup ("ngram": prompt and output) or own output alone ("suffix").

    For a row with known tokens t[0 … v), searched from position a (0, or the prompt's length; after the last embedding
    of a prompt that has some):

        the match at j is the largest m ≤ max_match with t[j − m … j) = t[v − m … v) and j − m ≥ a, j < v
        take the longest match, of equal ones the latest; if it has min_match tokens, the drafts are the first k tokens
        of t[j … v), t[j … v), …

    Each call reads the known tokens of its rows once: 4 bytes per token, of which a step reads all keys and values.
    Without the native module, array operations compute the same.

    match_lengths: m of each row of the last call, 0 without drafts.
    """

    relative_cost = 0.0

    def __init__(self, states: RequestStates, config: SpeculationConfig) -> None:
        self.states, self.config = states, config
        self.match_lengths = np.zeros(0, np.int32)
        self._drafts = np.empty((states.max_num_reqs, config.num_tokens), np.int32)
        self._lengths = np.empty(states.max_num_reqs, np.int32)
        self._core: native.TokenLookup | None = None
        if available():
            self._core = native.TokenLookup(states.token_ids, states.num_tokens, config.min_match, config.max_match)

    def propose(self, rows: I32, most: I32) -> I32:
        """Return up to most[i] drafts for rows[i], [n, num_tokens] padded with −1, valid until the next call."""
        drafts, self.match_lengths = self._drafts[: len(rows)], self._lengths[: len(rows)]
        first = self._first(rows)
        if self._core is None:
            self._search(rows, first, most)
        else:
            self._core.propose(rows, first, most, drafts, self.match_lengths)
        return drafts

    def _first(self, rows: I32) -> I32 | None:
        """Return the positions where matches may begin; None for 0."""
        states, first = self.states, None
        if self.config.method == "suffix":
            first = states.prompt_len.take(rows)
        if states.extras.prompt_embeds and states.extras.is_embedding is not None:
            embedded = states.extras.is_embedding[rows, : int(states.num_tokens[rows].max())]
            after_last = np.where(embedded.any(1), embedded.shape[1] - embedded[:, ::-1].argmax(1), 0)
            first = np.maximum(0 if first is None else first, after_last).astype(np.int32)
        return first

    def _search(self, rows: I32, from_position: I32 | None, most: I32) -> None:
        states = self.states
        known = states.num_tokens[rows].astype(np.int64)
        first = np.zeros_like(known) if from_position is None else from_position
        longest = int(known.max())
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
        best = longest - 1 - np.where(candidate, match, -1)[:, ::-1].argmax(1)
        length = match[np.arange(len(rows)), best]
        self.match_lengths[:] = np.where((length >= self.config.min_match) & (most > 0), length, 0)
        column = np.arange(self.config.num_tokens)
        good = (self.match_lengths > 0)[:, None] & (column < most[:, None])
        drafts = states.token_ids[rows[:, None], best[:, None] + column % np.maximum(known - best, 1)[:, None]]
        self._drafts[: len(rows)] = np.where(good, drafts, -1)
