"""Routes of embeddings, scores, rankings and classes, as far as the model does them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.pooling import PoolingRequestOutput, plan_scores
from foreword.executors import Capability
from foreword.openai.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    ScoreRequest,
    classify_body,
    embeddings_body,
    parse_classify,
    parse_embeddings,
    parse_rerank,
    parse_score,
    rerank_body,
    score_body,
)
from foreword.server.context import Context
from foreword.server.generation import Generation
from foreword.server.openapi import Body, Operation
from foreword.server.reply import apart, built_reply, is_small, json_body, parsed, reply

EMBEDDINGS = {"input": ["A man is eating food."], "dimensions": 16}
SCORE = {"text_1": "food", "text_2": ["bread", "memory"]}
RERANK = {"query": "food", "documents": ["memory", "bread"]}
CLASSIFY = {"input": "A man is eating food."}
"""Examples of bodies."""

T = TypeVar("T", ClassifyRequest, EmbeddingRequest, ScoreRequest)


def routes_of(context: Context) -> list[Operation]:
    """/v1/embeddings, /score and /v1/score, /rerank, /v1/rerank and /v2/rerank, and /classify of a classifier."""
    engine = context.engine.engine
    if Capability.POOLING not in engine.executor.capabilities:
        return []

    async def embeddings(request: Request) -> Response:
        """The embeddings of texts, in OpenAI's form."""
        generation, wanted, named = await _begin(context, request, parse_embeddings)
        outputs = await _pooled(generation, wanted)
        num_numbers = sum(output.outputs.data.size for output in outputs)
        return await built_reply(num_numbers, embeddings_body, wanted, outputs, **named)

    async def classify(request: Request) -> Response:
        """The likeliest label of each text, in vLLM's form."""
        generation, wanted, named = await _begin(context, request, parse_classify)
        outputs = await _pooled(generation, wanted)
        return reply(classify_body(engine.pooling.labels, outputs, **named))

    async def score(request: Request) -> Response:
        """How well texts fit one another, in vLLM's form."""
        generation, wanted, named = await _begin(context, request, parse_score)
        return reply(score_body(await _scores(context, request, generation, wanted), **named))

    async def rerank(request: Request) -> Response:
        """Documents in the order of how well they fit a query, in Jina's and Cohere's form."""
        generation, wanted, named = await _begin(context, request, parse_rerank)
        return reply(rerank_body(wanted, await _scores(context, request, generation, wanted), **named))

    routes = [Operation("/v1/embeddings", embeddings, Body(parse_embeddings, EMBEDDINGS))]
    if engine.pooling.is_cross_encoder or not engine.pooling.head:
        routes += [Operation(path, score, Body(parse_score, SCORE)) for path in ("/score", "/v1/score")]
        paths = ("/rerank", "/v1/rerank", "/v2/rerank")
        routes += [Operation(path, rerank, Body(parse_rerank, RERANK)) for path in paths]
    if "classify" in engine.pooling.tasks:
        routes.append(Operation("/classify", classify, Body(parse_classify, CLASSIFY)))
    return routes


async def _begin(
    context: Context, request: Request, parse: Callable[[object], T]
) -> tuple[Generation, T, dict[str, Any]]:
    """What every route begins with: its time, its fields, and the name of the model."""
    generation, body = Generation(context, request), await json_body(request)
    await generation.limit_time(body)
    wanted = await parsed(parse, body, request)
    model = context.check_model(wanted.model)
    return generation, wanted, {"response_id": generation.id, "created": int(time.time()), "model": model}


async def _pooled(generation: Generation, wanted: ClassifyRequest) -> list[PoolingRequestOutput]:
    count = len(wanted.prompts)
    generation.enter_many(count)
    return await generation.pooled(wanted.prompts, [wanted.params] * count, wanted.options, "input")


async def _scores(
    context: Context, request: Request, generation: Generation, wanted: ScoreRequest
) -> list[PoolingRequestOutput]:
    """An output per document."""
    spec = context.engine.engine.pooling
    queries, documents = wanted.queries, wanted.documents
    arguments = context.tokenizer, spec, queries, documents, wanted.params, wanted.names
    plan = await apart(not is_small(request), plan_scores, *arguments)
    generation.enter_many(len(plan.prompts))
    return plan.read(await generation.pooled(plan.prompts, plan.params, wanted.options))
