"""Measure the quality that number formats of weights and of the KV cache cost: each is compared with float32 on one
text.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword import LLM, SamplingParams
from foreword.arrays import F64, I64
from foreword.errors import ConfigError
from foreword.models.loader import load_model

TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("typesmethods", "exceptions", "execmodel", "naming"))
"""Documentation of Python's language, of the Python in use: prose with some code."""
EXACT = ("fp32", "fp32")
FORMATS = (("auto", "fp32"), ("auto", "bf16"), ("auto", "int8"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"),
           ("q4", "int8"))  # fmt: skip
"""Pairs of weight_format and kv_format."""


@dataclass(frozen=True, slots=True)
class QualityResult:
    """A model in a pair of formats, beside fp32, over the tokens of a text after its first.

    change: of the perplexity, relative. mean_change, largest_change: of the log-probability of a token, absolute.
    same_tokens: the fraction of positions at which the most probable token is the same.
    """

    model: str
    weight_format: str
    kv_format: str
    num_tokens: int
    perplexity: float
    change: float
    mean_change: float
    largest_change: float
    same_tokens: float


def run(
    model: str,
    *,
    formats: Sequence[tuple[str, str]] = FORMATS,
    text: str = TEXT,
    num_tokens: int = 1200,
    num_threads: int | None = None,
) -> Iterator[QualityResult]:
    """Yield results in fp32, then for each pair of formats. Raise ConfigError for fewer tokens than ``num_tokens``."""
    tokens = load_model(model).tokenizer.encode(text)
    if len(tokens) < num_tokens:
        raise ConfigError(f"num_tokens={num_tokens}: the text has {len(tokens)} tokens; give a longer text")
    tokens = tokens[:num_tokens]
    exact, greedy = _read(model, *EXACT, tokens, num_threads)
    for pair in (EXACT, *formats):
        logprobs, top = (exact, greedy) if pair == EXACT else _read(model, *pair, tokens, num_threads)
        change = logprobs - exact
        yield QualityResult(
            model=model,
            weight_format=pair[0],
            kv_format=pair[1],
            num_tokens=num_tokens,
            perplexity=float(np.exp(-logprobs.mean())),
            change=float(np.expm1(-change.mean())),
            mean_change=float(np.abs(change).mean()),
            largest_change=float(np.abs(change).max()),
            same_tokens=float((top == greedy).mean()),
        )


def _read(
    model: str, weight_format: str, kv_format: str, tokens: list[int], num_threads: int | None
) -> tuple[F64, I64]:
    """Return the log-probability of each token but the first, and the most probable token in its place."""
    options: dict[str, Any] = {"executor": "native", "num_threads": num_threads}
    llm = LLM(
        model,
        weight_format=weight_format,
        kv_format=kv_format,
        max_num_seqs=4,
        max_model_len=len(tokens) + 1,
        max_num_batched_tokens=256,  # bounds the memory of the logits
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    [output] = llm.generate([tokens], params, progress=False)
    entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
    logprobs = np.array([entry.chosen.logprob for entry in entries])
    top = np.array([next(token for token, found in entry.items() if found.rank == 1) for entry in entries])
    return logprobs, top
