"""What a request must be before it is let in. Nothing that passes here can make a step fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreword.arrays import I32
from foreword.batch.values.integers import is_int32
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import RequestError

MAX_COMPLETIONS = 16384  # of one prompt: each is a request of its own, made at once


def checked_prompt(request_id: str, token_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> I32:
    """The prompt as int32; RequestError if it is empty, too long, or holds something that is no token id."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        ids = np.empty((0, 0), object)
    if ids.size == 0 and ids.ndim <= 1:
        raise RequestError(request_id, "prompt_token_ids", [], "is empty", "Give at least one token.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            request_id, "prompt_token_ids", token_ids, "must be a flat list of integers", "Pass token ids, or a string."
        )
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise RequestError(
            request_id,
            f"prompt_token_ids[{at}]",
            int(ids[at]),
            f"is no token id, the vocabulary has {vocab_size}",
            "Use the tokenizer of this model.",
        )
    if len(ids) >= max_model_len:
        raise RequestError(
            request_id,
            "prompt_token_ids",
            f"{len(ids)} tokens",
            f"leaves no room for an output: max_model_len is {max_model_len}",
            f"Shorten the prompt to {max_model_len - 1} tokens, or raise max_model_len if the model allows it.",
        )
    return ids.astype(np.int32)


def checked_params(request_id: str, params: object, *, vocab_size: int) -> SamplingParams:
    """The parameters; RequestError for what is none, or has a value out of range."""
    if not isinstance(params, SamplingParams):
        raise RequestError(request_id, "params", params, "is no SamplingParams", "Pass foreword.SamplingParams(...).")
    params.check(request_id, vocab_size)
    for field, count in (("n", params.n), ("best_of", params.best_of or 1)):
        if count > MAX_COMPLETIONS:
            raise RequestError(request_id, field, count, f"is above {MAX_COMPLETIONS}", "Add the prompt several times.")
    return params


def check_id(request_id: object) -> None:
    """RequestError unless it is a string without a null character."""
    if not isinstance(request_id, str):
        raise RequestError(None, "request_id", request_id, "is no string", "Name requests by strings.")
    if "\0" in request_id:
        raise RequestError(request_id, "request_id", request_id, "holds a null character", "Use another id.")


def check_options(request_id: str, *, priority: object, lora_id: object, cache_salt: object) -> None:
    """RequestError for an option of another type, which would fail the step that admits it."""
    if not is_int32(priority):
        raise RequestError(request_id, "priority", priority, "is no whole number", "Smaller goes first; 0 is usual.")
    if not is_int32(lora_id, 0):
        raise RequestError(request_id, "lora_id", lora_id, "is no adapter's number", "Use 0 for none, or 1 and up.")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(request_id, "cache_salt", cache_salt, "is no string", "Give a string, or None for none.")
