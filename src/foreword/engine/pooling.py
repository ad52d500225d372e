"""Results of pooling requests, and the requests that score pairs of texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreword.arrays import F32
from foreword.batch import PoolingParams, PoolingTask
from foreword.engine.outputs import RequestMetrics, RequestOutput
from foreword.errors import EngineError, ForewordError, RequestError
from foreword.models.pooling import PoolingSpec
from foreword.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """data: float32, an embedding [dimensions], probabilities [labels], or one row of these per token or step."""

    data: F32

    @property
    def embedding(self) -> list[float]:
        """The vector of the text."""
        return [float(value) for value in self.data]

    @property
    def probs(self) -> list[float]:
        """The probability of each label."""
        return [float(value) for value in self.data]

    @property
    def score(self) -> float:
        """The only number of the result. Raise EngineError if it has several."""
        if self.data.size != 1:
            raise EngineError(f"the result has shape {self.data.shape}, not one number: read its data")
        return float(self.data.reshape(-1)[0])


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """The result of a pooling request. error: why there is none; then ``outputs`` raises it.

    prompt: its text, None if it was given as token ids.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    pooled: F32 | None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    error: ForewordError | None = None

    @property
    def outputs(self) -> PoolingOutput:
        """The result. Raises ``error`` if the request failed."""
        if self.pooled is None:
            raise self.error or EngineError(f"request {self.request_id!r} was aborted")
        return PoolingOutput(self.pooled)


def pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    """Return what users get of a pooling request's final output."""
    return PoolingRequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids, output.pooled, output.metrics, output.error
    )


def with_task(params: PoolingParams | None, task: PoolingTask) -> PoolingParams:
    """Return the parameters for a task, by default the task's own."""
    return replace(params or PoolingParams(), task=task)


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The requests that score documents. pairs: of embeddings with a cosine as score; None: each request is a pair."""

    prompts: list[str | list[int]]
    params: list[PoolingParams]
    pairs: list[tuple[int, int]] | None = None

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens of all that `read` returns. lengths: of the requests' prompts."""
        return sum(lengths) if self.pairs is None else sum(lengths[i] + lengths[j] for i, j in self.pairs)

    def read(self, outputs: Sequence[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
        """Return an output per document, from those of the requests; a cosine has the tokens of both texts."""
        if self.pairs is None:
            return list(outputs)
        return [_cosine(outputs[i], outputs[j]) for i, j in self.pairs]


def plan_scores(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    params: PoolingParams | None,
    names: tuple[str, str] = ("queries", "documents"),
) -> ScorePlan:
    """Return how well document i fits query i, or one query with every document. names: of both fields, in errors.

    A cross-encoder reads both texts together; of another model each distinct text is embedded once. Raise RequestError
    for texts that do not pair up, and for the classifier of several labels.
    """
    firsts, seconds = _paired(queries, documents, names)
    if spec.head and not spec.is_cross_encoder:
        reason = f"the model's head has {spec.head[-1].outputs} outputs, not one"
        raise RequestError(None, "task", "score", reason, "Use a cross-encoder or an embedding model.")
    if not spec.is_cross_encoder:
        return _comparisons(firsts, seconds, spec, with_task(params, "embed"))
    prompts: list[str | list[int]] = []
    each = []
    for i, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        try:
            token_ids, first_len = tokenizer.encode_pair(first, second)
        except RequestError as error:
            raise RequestError(None, f"{names[1]}[{i}]", error.value, error.reason, error.fix) from None
        prompts.append(token_ids)
        types = first_len if spec.num_token_types > 1 else None
        each.append(replace(with_task(params, "score"), first_text_len=types))
    return ScorePlan(prompts, each)


def _comparisons(firsts: list[str], seconds: list[str], spec: PoolingSpec, params: PoolingParams) -> ScorePlan:
    """Return the embeddings to compare, with the model's prompts for queries and documents unless one is named."""
    if spec.comparison != "cosine":
        reason = f"the model compares embeddings by {spec.comparison}, and a score is the cosine"
        raise RequestError(None, "task", "score", reason, "Embed the texts with normalize=False and compare them.")
    names = spec.prompt_name("query"), spec.prompt_name("document", "passage", "corpus")
    if params.prompt_name is not None:
        names = params.prompt_name, params.prompt_name
    keys = [[(name, text) for text in texts] for name, texts in zip(names, (firsts, seconds), strict=True)]
    places = {key: i for i, key in enumerate(dict.fromkeys([*keys[0], *keys[1]]))}
    pairs = [(places[first], places[second]) for first, second in zip(*keys, strict=True)]
    return ScorePlan([text for _, text in places], [replace(params, prompt_name=name) for name, _ in places], pairs)


def _texts(name: str, given: object) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or (isinstance(given, np.ndarray) and not given.ndim):
        raise RequestError(None, name, given, "must be a text or a list of texts", "Pass a str or a list.")
    return list(given)


def _paired(
    queries: str | Sequence[str], documents: str | Sequence[str], names: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Pair queries with documents. Raises RequestError if the counts differ or an item is not text."""
    firsts, seconds = _texts(names[0], queries), _texts(names[1], documents)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds) or not seconds:
        reason = f"{len(firsts)} texts of {names[0]} do not pair with them"
        raise RequestError(
            None, names[1], f"{len(seconds)} texts", reason, f"Give {names[0]} one text, or one for each."
        )
    for name, texts in zip(names, (firsts, seconds), strict=True):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise RequestError(None, f"{name}[{i}]", text, "must be a text", "Pass a str.")
    return firsts, seconds


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> PoolingRequestOutput:
    """Return the cosine of the angle between two vectors of unit length."""
    error = first.error or second.error
    pooled = None if error else np.vdot(first.outputs.data, second.outputs.data).reshape(1)
    token_ids = [*first.prompt_token_ids, *second.prompt_token_ids]
    return PoolingRequestOutput(second.request_id, None, token_ids, pooled, second.metrics, error)
