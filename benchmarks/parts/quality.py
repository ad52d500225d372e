"""Measure the quality that number formats of weights and of the KV cache cost: each is compared with float32 on parts
of a text.
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

TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("execmodel", "naming", "types", "compound"))
"""Documentation of Python's language, of the Python in use: prose with some code."""
EXACT = ("fp32", "fp32")
FORMATS = (("auto", "fp32"), ("auto", "bf16"), ("auto", "int8"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"),
           ("q4", "int8"))  # fmt: skip
"""Pairs of weight_format and kv_format."""


@dataclass(frozen=True, slots=True)
class QualityResult:
    """A model in a pair of formats, beside fp32, over the tokens of each part of a text after its first.

    change: of the perplexity, relative. error: the standard error of ``change``, of the tokens that were read.
    mean_change, largest_change: of the log-probability of a token, absolute. same_tokens: the fraction of positions at
    which the most probable token is the same.
    """

    model: str
    weight_format: str
    kv_format: str
    num_texts: int
    num_tokens: int
    perplexity: float
    change: float
    error: float
    mean_change: float
    largest_change: float
    same_tokens: float


def run(
    model: str,
    *,
    formats: Sequence[tuple[str, str]] = FORMATS,
    text: str = TEXT,
    num_texts: int = 8,
    num_tokens: int = 800,
    num_threads: int | None = None,
) -> Iterator[QualityResult]:
    """Yield results in fp32, then for each pair of formats, over the first parts of ``num_tokens`` tokens of a text.
    Raise ConfigError for a text of fewer tokens.
    """
    tokens = load_model(model).tokenizer.encode(text)
    if len(tokens) < num_texts * num_tokens:
        raise ConfigError(
            f"num_texts={num_texts}, num_tokens={num_tokens}: the text has {len(tokens)} tokens; give a longer text"
        )
    texts = [tokens[i * num_tokens :][:num_tokens] for i in range(num_texts)]
    exact, greedy = _read(model, *EXACT, texts, num_threads)
    for pair in (EXACT, *formats):
        logprobs, top = (exact, greedy) if pair == EXACT else _read(model, *pair, texts, num_threads)
        change = logprobs - exact
        yield QualityResult(
            model=model,
            weight_format=pair[0],
            kv_format=pair[1],
            num_texts=num_texts,
            num_tokens=num_tokens,
            perplexity=float(np.exp(-logprobs.mean())),
            change=float(np.expm1(-change.mean())),
            error=float(change.std() / np.sqrt(len(change))),
            mean_change=float(np.abs(change).mean()),
            largest_change=float(np.abs(change).max()),
            same_tokens=float((top == greedy).mean()),
        )


def _read(
    model: str, weight_format: str, kv_format: str, texts: list[list[int]], num_threads: int | None
) -> tuple[F64, I64]:
    """Return the log-probability of each token but the first of a text, and the most probable token in its place."""
    options: dict[str, Any] = {"executor": "native", "num_threads": num_threads}
    llm = LLM(
        model,
        weight_format=weight_format,
        kv_format=kv_format,
        max_num_seqs=1,
        max_model_len=len(texts[0]) + 1,
        max_num_batched_tokens=256,  # bounds the memory of the logits
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate(texts, params, progress=False)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry is not None]
    logprobs = np.array([entry.chosen.logprob for entry in entries])
    top = np.array([next(token for token, found in entry.items() if found.rank == 1) for entry in entries])
    return logprobs, top
