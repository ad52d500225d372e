"""Why a row of logits gives no token. The request of the row ends with the error, and the step goes on."""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32
from foreword.errors import ModelOutputError, RequestError


class NoTokenLeftError(RequestError):
    """Masks and processors leave no token to which the model gives a probability above 0."""

    def __init__(self, request_id: str, step: int) -> None:
        super().__init__(
            request_id,
            "structured_outputs",
            f"token mask of step {step}",
            "the grammar or the logits processors allow no token that the model can produce here",
            "Use a grammar that the tokenizer's vocabulary can follow, and that allows an end token when complete.",
        )


class GrammarStoppedError(ValueError):
    """A grammar stopped in the middle of an output, for example at a limit of its size. Its request ends
    with an error.
    """


class BadLogitsError(ModelOutputError):
    """The model's logits are not numbers: one is NaN or +∞, or all are −∞."""

    def __init__(self, request_id: str, step: int) -> None:
        super().__init__(
            request_id,
            "logits",
            f"step {step}",
            "the model computed NaN or infinite logits",
            "Verify the model's weights (`foreword models pull` fetches a known model again).",
        )


def has_choice(logits: F32) -> bool:
    """Return whether a token can be drawn from a row of logits [V]: no NaN, no +∞, and one above −∞."""
    return bool(np.isfinite(logits.max()))
