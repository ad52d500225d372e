"""Bodies of pooling requests and responses: OpenAI's embeddings, vLLM's score and classify, Jina's and Cohere's rerank.

A field that is null counts as absent. Each parser raises a RequestError that names the field if a field is unknown or a
value has another type. The engine checks ranges.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.arrays import F32
from foreword.batch import PoolingParams
from foreword.engine import RequestOptions
from foreword.engine.pooling import PoolingRequestOutput
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, INTEGER, STRING, STRINGS, Fields, Kind, either, list_of, one_of
from foreword.openai import neutral
from foreword.openai.request import LABELS, prompts_of, request_options
from foreword.openai.response import Body, Named, head


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest:
    """The body of /classify."""

    model: str | None
    prompts: list[str | list[int]]
    params: PoolingParams
    options: RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ClassifyRequest):
    """The body of /v1/embeddings. base64: vectors as bytes of little-endian float32 in base64."""

    base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """The body of /score or /rerank. names: the names of the fields with queries and documents. top_n: the number of
    results; None: all.
    """

    model: str | None
    queries: list[str]
    documents: list[str]
    params: PoolingParams
    options: RequestOptions
    names: tuple[str, str]
    top_n: int | None = None
    return_documents: bool = True


_TEXTS = either(STRING, STRINGS)
_TEXT_OF = {"type": "object", "properties": {"text": STRING.schema}, "required": ["text"]}
_DOCUMENT = Kind(
    'a text or {"text": …}',
    lambda value: isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("text"), str)),
    {"anyOf": [STRING.schema, _TEXT_OF]},
)
_DOCUMENTS = list_of(_DOCUMENT, 'a list of texts or of {"text": …}')


def parse_embeddings(body: object) -> EmbeddingRequest:
    """Parse a body of /v1/embeddings."""
    fields = Fields(body)
    request = EmbeddingRequest(
        model=_model(fields),
        prompts=prompts_of(fields, "input"),
        base64=fields.take("encoding_format", one_of("float", "base64"), "float") == "base64",
        params=_params(
            fields,
            "embed",
            dimensions=fields.take("dimensions", INTEGER),
            normalize=fields.take("normalize", BOOLEAN, True),
            prompt_name=fields.take("prompt_name", STRING),
        ),
        options=request_options(fields),
    )
    fields.end(neutral.POOLING)
    return request


def parse_classify(body: object) -> ClassifyRequest:
    """Parse a body of /classify."""
    fields = Fields(body)
    request = ClassifyRequest(
        model=_model(fields),
        prompts=prompts_of(fields, "input"),
        params=_params(fields, "classify"),
        options=request_options(fields),
    )
    fields.end(neutral.POOLING)
    return request


def parse_score(body: object) -> ScoreRequest:
    """Parse a body of /score: one text_1 is compared with all of text_2, or each with its own."""
    fields = Fields(body)
    first, second = fields.require("text_1", _TEXTS), fields.require("text_2", _TEXTS)
    request = ScoreRequest(
        model=_model(fields),
        queries=[first] if isinstance(first, str) else first,
        documents=[second] if isinstance(second, str) else second,
        params=_params(fields, "score"),
        options=request_options(fields),
        names=("text_1", "text_2"),
    )
    fields.end(neutral.POOLING)
    return request


def parse_rerank(body: object) -> ScoreRequest:
    """Parse a body of /rerank: the documents are to be sorted by how well they fit the query."""
    fields = Fields(body)
    documents = fields.require("documents", _DOCUMENTS)
    top_n = fields.take("top_n", INTEGER)
    if top_n is not None and top_n < 1:
        raise RequestError(None, "top_n", top_n, "must be 1 or more", "Leave it out for all documents.")
    request = ScoreRequest(
        model=_model(fields),
        queries=[fields.require("query", STRING)],
        documents=[one if isinstance(one, str) else one["text"] for one in documents],
        top_n=top_n,
        return_documents=fields.take("return_documents", BOOLEAN, True),
        params=_params(fields, "score"),
        options=request_options(fields),
        names=("query", "documents"),
    )
    fields.end(neutral.POOLING)
    return request


def _model(fields: Fields) -> str | None:
    for name, kind in LABELS.items():
        fields.take(name, kind)
    model: str | None = fields.take("model", STRING)
    return model


def _params(fields: Fields, task: Any, **values: Any) -> PoolingParams:
    return PoolingParams(task=task, truncate_prompt_tokens=fields.take("truncate_prompt_tokens", INTEGER), **values)


def embeddings_body(request: EmbeddingRequest, outputs: Sequence[PoolingRequestOutput], **named: Any) -> Body:
    """Return the body of an answer to /v1/embeddings. Each vector is encoded when it is written."""
    vectors = (output.outputs.data for output in outputs)
    data = (
        {"object": "embedding", "index": i, "embedding": _base64(vector) if request.base64 else vector.tolist()}
        for i, vector in enumerate(vectors)
    )
    return _list("embd", data, outputs, named)


def classify_body(labels: Sequence[str], outputs: Sequence[PoolingRequestOutput], **named: Any) -> Body:
    """Return the body of an answer to /classify. If the model has one label, only its probability is given."""
    data = (
        {"index": i, "label": labels[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(probs)}
        for i, probs in enumerate(output.outputs.data for output in outputs)
    )
    return _list("classify", data, outputs, named)


def score_body(outputs: Sequence[PoolingRequestOutput], **named: Any) -> Body:
    """Return the body of an answer to /score."""
    data = [{"index": i, "object": "score", "score": output.outputs.score} for i, output in enumerate(outputs)]
    return _list("score", data, outputs, named)


def rerank_body(request: ScoreRequest, outputs: Sequence[PoolingRequestOutput], **named: Any) -> Body:
    """Return the body of an answer to /rerank: the best documents first; equal scores keep the order of the input."""
    scores = [output.outputs.score for output in outputs]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n]
    results = []
    for i in order:
        document = {"document": {"text": request.documents[i]}} if request.return_documents else {}
        results.append({"index": i, **document, "relevance_score": scores[i]})
    used = _usage(outputs)
    return {"id": f"rerank-{named['response_id']}", "model": named["model"], "usage": used, "results": results}


def _list(prefix: str, data: Iterable[Body], outputs: Sequence[PoolingRequestOutput], named: Any) -> Body:
    fields: Named = named
    return {**head("list", prefix, fields), "data": data, "usage": _usage(outputs)}


def _usage(outputs: Sequence[PoolingRequestOutput]) -> Body:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": count, "total_tokens": count}


def _base64(vector: F32) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
