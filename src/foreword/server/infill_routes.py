"""llama.cpp's operation that fills a gap in a text, as editors call it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from foreword.engine import RequestOutput
from foreword.openai.infill import InfillRequest, InfillStream, infill_body, parse_infill
from foreword.openai.response import num_values
from foreword.server.answer import Api
from foreword.server.generation import Generation
from foreword.server.operation import EVENTS, JSON, Body, Operation
from foreword.server.reply import reply


async def _infill(generation: Generation, wanted: InfillRequest) -> AsyncGenerator[RequestOutput, None]:
    generation.enter(wanted.params)
    context = generation.context
    prompt, params = wanted.prompt(context.tokenizer, context.engine.engine.states.max_model_len)
    return generation.outputs(
        await generation.check("input_prefix", [prompt], [params], wanted.options, stream=wanted.stream)
    )


INFILL: Api[InfillRequest, RequestOutput] = Api(
    body=Body(
        parse_infill,
        {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
        timeout=True,
        samples=True,
    ),
    run=_infill,
    whole=lambda context, wanted, outputs, named: reply(infill_body(wanted, outputs, **named)),
    size=num_values,
    stream=lambda context, wanted, named: InfillStream(wanted, **named) if wanted.stream else None,
)

# fmt: off
OPERATIONS = (
    Operation(
        "/infill", INFILL, INFILL.body,
        access="key", summary="Fill a gap in a text (llama.cpp, as editors call it).",
        details="`input_prefix`, `input_suffix`, `input_extra` and `prompt` are the texts around the gap; models that"
        " have tokens for it answer. `n_indent`, `samplers`, `t_max_prompt_ms` and `t_max_predict_ms` are accepted and"
        " have no effect.",
        is_served=lambda context: context.tokenizer.infill is not None,
        media_types=(JSON, EVENTS),
    ),
)
