"""Prompts and parameters that were checked. Their constructors check them, so later code need not check again."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import numpy as np

from foreword.arrays import I32
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPrompt:
    """A prompt whose token ids are in the vocabulary.

    token_ids: int32 [T], a contiguous copy that cannot be written. Raise RequestError for an id outside of the
    vocabulary.
    """

    token_ids: I32
    vocab_size: int
    request_id: InitVar[str | None] = None

    def __post_init__(self, request_id: str | None) -> None:
        ids = np.array(self.token_ids, np.int32, order="C")
        bad = (ids < 0) | (ids >= self.vocab_size)
        if bad.any():
            at = int(bad.argmax())
            raise RequestError(
                request_id,
                f"prompt_token_ids[{at}]",
                int(ids[at]),
                f"must be in [0, {self.vocab_size - 1}], the vocabulary has {self.vocab_size} tokens",
                "Use the tokenizer of this model.",
            )
        ids.flags.writeable = False
        object.__setattr__(self, "token_ids", ids)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedParams:
    """Sampling parameters whose values are in range, with token ids of a vocabulary.

    Raises a RequestError with the request's id for the first value that is not.
    """

    params: SamplingParams
    vocab_size: int
    request_id: InitVar[str | None] = None

    def __post_init__(self, request_id: str | None) -> None:
        self.params.check(request_id, self.vocab_size)

    def of_completion(self, *, seed: int, logprobs: int | None, prompt_logprobs: int | None) -> CheckedParams:
        """Return the parameters of one completion, with n = 1 and these values, which were derived from checked
        values.
        """
        other = object.__new__(CheckedParams)
        params = self.params.with_values(
            seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs, n=1, best_of=None
        )
        object.__setattr__(other, "params", params)
        object.__setattr__(other, "vocab_size", self.vocab_size)
        return other
