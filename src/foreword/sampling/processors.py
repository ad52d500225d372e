"""What changes one row of logits before a token is chosen from it, in this order:

allowed ids, bias, minimum length  →  penalties  →  bad words
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch.values.sampling_params import SamplingParams

NEVER = np.float32(-np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Processors:
    """The rarely used parameters of one request, as arrays. ``process`` applies them."""

    allowed: I64 | None
    bias_ids: I64
    bias: F32
    min_tokens: int
    end_ids: I64
    repetition: float
    frequency: float
    presence: float
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: SamplingParams, end_ids: I64) -> Processors | None:
        """None if the parameters leave logits as they are. end_ids: tokens that would end the output."""
        bias = params.logit_bias or {}
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        bad_words = tuple(tuple(word) for word in params.bad_words_token_ids if len(word))
        masks = params.allowed_token_ids is not None or bool(bias) or params.min_tokens > 0 or bool(bad_words)
        if not masks and penalties == (1.0, 0.0, 0.0):
            return None
        return cls(
            None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, np.int64)),
            np.array(list(bias), np.int64),
            np.array(list(bias.values()), np.float32),
            params.min_tokens,
            end_ids,
            *penalties,
            bad_words,
        )

    def process(self, logits: F32, prompt: I32, output: I32) -> F32:
        """The changed copy of one row [V], for the token after ``prompt + output``.

        A rule that would forbid every token that is still possible is not applied.
        """
        z = logits.copy()
        if self.allowed is not None:
            z[:] = NEVER
            z[self.allowed] = logits[self.allowed]
        if len(self.bias):
            biased = z.copy()
            biased[self.bias_ids] += self.bias
            z = _unless_all_forbidden(biased, z)
        if len(output) < self.min_tokens:
            z = _without(z, self.end_ids)
        self._penalize(z, prompt, output)
        return _without(z, self._bad_ends(prompt, output)) if self.bad_words else z

    def _penalize(self, z: F32, prompt: I32, output: I32) -> None:
        if self.repetition != 1.0:
            seen = np.union1d(prompt, output)
            z[seen] = np.where(
                z[seen] > 0, z[seen] / np.float32(self.repetition), z[seen] * np.float32(self.repetition)
            )
        if self.frequency or self.presence:
            made, count = np.unique(output, return_counts=True)
            z[made] -= np.float32(self.frequency) * count.astype(np.float32) + np.float32(self.presence)

    def _bad_ends(self, prompt: I32, output: I32) -> I64:
        longest = max(len(word) for word in self.bad_words) - 1
        tail = tuple(np.concatenate([prompt[-longest:], output[-longest:]])[-longest:].tolist()) if longest else ()
        ends = [w[-1] for w in self.bad_words if len(w) == 1 or tail[-(len(w) - 1) :] == w[:-1]]
        return np.array(ends, np.int64)


def _without(z: F32, ids: I64) -> F32:
    masked = z.copy()
    masked[ids] = NEVER
    return _unless_all_forbidden(masked, z)


def _unless_all_forbidden(z: F32, before: F32) -> F32:
    return z if (z > NEVER).any() else before
