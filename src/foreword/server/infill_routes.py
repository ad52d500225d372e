"""llama.cpp's operation that fills a gap in a text, as editors call it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from foreword.engine import RequestOutput
from foreword.openai.infill import InfillRequest, InfillStream, LineEnd, cut, infill_body, parse_infill
from foreword.openai.response import num_values
from foreword.server.answer import Api
from foreword.server.events import EVENTS
from foreword.server.generation import Generation
from foreword.server.operation import JSON, Body, Operation
from foreword.server.reply import reply


async def _infill(generation: Generation, wanted: InfillRequest) -> AsyncGenerator[RequestOutput, None]:
    generation.enter(wanted.params)
    context = generation.context
    prompt, params = wanted.prompt(context.tokenizer, context.engine.engine.states.max_model_len)
    ends = not wanted.predicts or wanted.indent > 0 or wanted.predict_ms > 0
    stream = wanted.stream or ends  # which needs to see the text as it comes
    outputs = generation.outputs(
        await generation.check("input_prefix", [prompt], [params], wanted.options, stream=stream)
    )
    return _ended(generation, wanted, outputs) if ends else outputs


async def _ended(
    generation: Generation, wanted: InfillRequest, running: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs up to the end of a `LineEnd`, with which the request is aborted, or to that of the prompt; of
    an answer as a whole, the final one.
    """
    end, pieces = LineEnd(wanted.indent, wanted.predict_ms), list[str]()
    async with aclosing(running):
        async for output in running:
            new, num_tokens = output.outputs[0].new_text, output.outputs[0].num_tokens
            size = end.find(new)
            if not wanted.predicts:
                new, num_tokens, size = "", 0, 0
            elif size is None or (output.finished and size == len(new)):
                pieces.append(new)
                if wanted.stream or output.finished:
                    yield output
                continue
            generation.context.engine.abort(output.request_id)
            while not output.finished:
                output = await anext(running)
            yield cut(output, [*pieces, new[:size]], num_tokens)
            return


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
        " have tokens for it answer. `n_predict` 0 puts the prompt into the cache. The answer ends at a line that is"
        " indented by less than `n_indent`, and, once it has an end of a line, after `t_max_predict_ms` milliseconds."
        " `samplers` must be in the order in which Foreword applies them, and turns off those that it lacks. Its"
        " `infill`, and `t_max_prompt_ms`, have no effect.",
        is_served=lambda context: context.tokenizer.infill is not None,
        media_types=(JSON, EVENTS),
    ),
)
