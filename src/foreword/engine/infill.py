"""Prompts whose completion fills the gap between two texts."""

from __future__ import annotations

from dataclasses import replace

from foreword.batch import SamplingParams
from foreword.errors import RequestError
from foreword.models.tokenizer import Tokenizer


def make_infill(
    tokenizer: Tokenizer, before: object, after: object, params: SamplingParams, max_model_len: int
) -> tuple[list[int], SamplingParams]:
    """Return the tokens of a prompt for the gap between two texts, and parameters with which the output ends at the end
    of the gap. Raise RequestError for values that are not text, and as in `Tokenizer.encode_infill`.
    """
    for name, text in (("prefix", before), ("suffix", after)):
        if not isinstance(text, str):
            raise RequestError(None, name, text, "is not text", "Give a str.")
    prompt = tokenizer.encode_infill(str(before), str(after), max_tokens=max_model_len)
    ends = () if tokenizer.infill is None else tokenizer.infill.ends
    return prompt, replace(params, stop_token_ids=sorted({*params.stop_token_ids, *ends}))
