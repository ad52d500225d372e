"""The rules of a request that no column of `SamplingColumns` holds: lists of tokens that change its logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from foreword.arrays import F32, I32
from foreword.batch import SamplingParams


class RequestRules(NamedTuple):
    """The lists of one request, as native code takes them.

    allowed: int32, ascending; None for no limit. bias_ids, bias: [N]. end_ids: tokens that end the output. bad_words:
    the words one after the other; bad_word_ends: the end of each. dry_breakers: ascending.
    """

    allowed: I32 | None
    bias_ids: I32
    bias: F32
    end_ids: I32
    bad_words: I32
    bad_word_ends: I32
    dry_breakers: I32

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int]) -> RequestRules:
        """Return the rules of these parameters. eos_token_ids: the model's end tokens."""
        bias = params.logit_bias or {}
        words = [word for word in params.bad_words_token_ids if word]
        return cls(
            None if params.allowed_token_ids is None else _ids(sorted(set(params.allowed_token_ids))),
            _ids(list(bias)),
            np.array(list(bias.values()), np.float32),
            _ids(sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})),
            _ids([token for word in words for token in word]),
            _ids(list(accumulate(map(len, words)))),
            _ids(sorted(set(params.dry_breaker_token_ids))),
        )


def _ids(ids: Sequence[int]) -> I32:
    return np.array(ids, np.int32)
