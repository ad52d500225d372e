"""Operations of embeddings, scores, rankings and classes, as far as the model does them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from foreword.batch import PoolingParams
from foreword.engine import RequestOptions
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.pooling import PoolingRequestOutput, ScorePlan, plan_scores, pooling_output
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
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.generation import Generation, in_order
from foreword.server.operation import Body, Operation
from foreword.server.reply import MANY, PiecesReply, apart, reply

ID_BYTES = 8  # the memory of a token id in an output: scores of one text with many have its ids many times


class Pooled(Protocol):
    """A request whose prompts give a result each."""

    @property
    def prompts(self) -> list[str | list[int]]: ...

    @property
    def params(self) -> PoolingParams: ...

    @property
    def options(self) -> RequestOptions: ...


async def pooled(generation: Generation, wanted: Pooled) -> AsyncGenerator[PoolingRequestOutput, None]:
    """Check the prompts of a request, and return the results of all, in their order."""
    generation.check_count("input", len(wanted.prompts))
    plan = ScorePlan(wanted.prompts, [wanted.params] * len(wanted.prompts))
    return await _run(generation, plan, wanted.options, "input")


async def _scored(generation: Generation, wanted: ScoreRequest) -> AsyncGenerator[PoolingRequestOutput, None]:
    for name, texts in zip(wanted.names, (wanted.queries, wanted.documents), strict=True):
        generation.check_count(name, len(texts))
    context = generation.context
    spec = context.engine.engine.pooling
    arguments = context.tokenizer, spec, wanted.queries, wanted.documents, wanted.params, wanted.names
    plan = await apart(not generation.is_small, plan_scores, *arguments)
    return await _run(generation, plan, wanted.options, "prompt")


async def _run(
    generation: Generation, plan: ScorePlan, options: RequestOptions, field: str
) -> AsyncGenerator[PoolingRequestOutput, None]:
    generation.enter_many(len(plan.prompts))
    checked = await generation.check(field, plan.prompts, plan.params, options)
    num_tokens = plan.num_tokens([len(one.group.prompt) for one in checked])
    generation.count_bytes(ID_BYTES * num_tokens)
    return _read(generation, plan, checked, num_tokens >= MANY)


async def _read(
    generation: Generation, plan: ScorePlan, checked: Sequence[CheckedRequest], is_long: bool
) -> AsyncGenerator[PoolingRequestOutput, None]:
    async with aclosing(generation.outputs(checked)) as running:
        outputs = in_order([output async for output in running])
    for output in await apart(is_long, plan.read, list(map(pooling_output, outputs))):
        yield output


def _num_numbers(outputs: Sequence[PoolingRequestOutput]) -> int:
    return sum(output.outputs.data.size for output in outputs)


def pools(context: Context) -> bool:
    """Return whether the model embeds texts."""
    return Capability.POOLING in context.engine.engine.executor.capabilities


def _scores(context: Context) -> bool:
    pooling = context.engine.engine.pooling
    return pools(context) and (pooling.is_cross_encoder or not pooling.head)


def _classifies(context: Context) -> bool:
    return pools(context) and "classify" in context.engine.engine.pooling.tasks


EMBEDDINGS: Api[EmbeddingRequest, PoolingRequestOutput] = Api(
    body=Body(parse_embeddings, {"input": ["A man is eating food."], "dimensions": 16}, timeout=True),
    run=pooled,
    whole=lambda context, wanted, outputs, named: PiecesReply(embeddings_body(wanted, outputs, **named)),
    size=_num_numbers,
)
CLASSIFY: Api[ClassifyRequest, PoolingRequestOutput] = Api(
    body=Body(parse_classify, {"input": "A man is eating food."}, timeout=True),
    run=pooled,
    whole=lambda context, wanted, outputs, named: PiecesReply(
        classify_body(context.engine.engine.pooling.labels, outputs, **named)
    ),
    size=_num_numbers,
)
SCORE: Api[ScoreRequest, PoolingRequestOutput] = Api(
    body=Body(parse_score, {"text_1": "food", "text_2": ["bread", "memory"]}, timeout=True),
    run=_scored,
    whole=lambda context, wanted, outputs, named: reply(score_body(outputs, **named)),
    size=_num_numbers,
)
RERANK: Api[ScoreRequest, PoolingRequestOutput] = Api(
    body=Body(parse_rerank, {"query": "food", "documents": ["memory", "bread"]}, timeout=True),
    run=_scored,
    whole=lambda context, wanted, outputs, named: reply(rerank_body(wanted, outputs, **named)),
    size=_num_numbers,
)

OPERATIONS = tuple(
    Operation(path, api, api.body, access="key", summary=summary, is_served=is_served)
    for paths, api, is_served, summary in (
        (("/v1/embeddings",), EMBEDDINGS, pools, "Embed one or more texts (OpenAI Embeddings)."),
        (("/score", "/v1/score"), SCORE, _scores, "Score how well texts fit one another (vLLM)."),
        (
            ("/rerank", "/v1/rerank", "/v2/rerank"),
            RERANK,
            _scores,
            "Order documents by how well they fit a query (Jina, Cohere).",
        ),
        (("/classify",), CLASSIFY, _classifies, "Find the likeliest label of each text (vLLM)."),
    )
    for path in paths
)
