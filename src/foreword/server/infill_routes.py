"""llama.cpp's operations: gaps in a text, as editors ask for them, completions, and the server's properties."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.engine import RequestOutput
from foreword.openai.frames import EVENTS
from foreword.openai.infill import InfillRequest, InfillStream, LineEnd, cut, infill_body, parse_infill
from foreword.openai.llama import DEFAULTS, LlamaRequest, parse_llama
from foreword.openai.response import num_values
from foreword.server.answer import Api
from foreword.server.context import Context
from foreword.server.generation import Generation
from foreword.server.operation import JSON, Body, Operation
from foreword.server.reply import reply
from foreword.server.tokens import token_text


async def _infill(generation: Generation, wanted: InfillRequest) -> AsyncGenerator[RequestOutput, None]:
    generation.enter(wanted.params)
    context = generation.context
    prompt, params = wanted.prompt(context.tokenizer, context.engine.engine.states.max_model_len)
    ends = not wanted.predicts or wanted.indent > 0 or wanted.predict_ms > 0
    stream = wanted.stream or ends  # which needs to see the text as it comes
    outputs = generation.outputs(
        await generation.check(wanted.prompt_field, [prompt], [params], wanted.options, stream=stream)
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

COMPLETION: Api[LlamaRequest, RequestOutput] = Api(
    body=Body(parse_llama, {"prompt": "Once upon a time", "n_predict": 16}, timeout=True, samples=True),
    run=_infill,
    whole=lambda context, wanted, outputs, named: reply(infill_body(wanted, outputs, **named)),
    size=num_values,
    stream=lambda context, wanted, named: InfillStream(wanted, **named) if wanted.stream else None,
)


async def _props(context: Context, request: Request) -> Response:
    engine, tokenizer = context.engine.engine, context.tokenizer
    eos = next(iter(tokenizer.eos_ids), None)
    return reply(
        {
            "default_generation_settings": {
                "n_ctx": engine.states.max_model_len,
                "params": {**DEFAULTS, **engine.suggested},
            },
            "total_slots": engine.states.max_num_reqs,
            "model_alias": context.names[0],
            "model_path": "" if context.path is None else str(context.path),
            "chat_template": tokenizer.chat_template() or "",
            "bos_token": token_text(tokenizer, tokenizer.bos_id) or "",
            "eos_token": token_text(tokenizer, eos) or "",
            "modalities": {"vision": context.media.encoder is not None, "audio": context.media.speech is not None},
            "build_info": f"foreword {__version__}",
        }
    )


# fmt: off
OPERATIONS = (
    Operation(
        "/completion", COMPLETION, COMPLETION.body,
        access="key", summary="Complete a prompt (llama.cpp).",
        details="`prompt` is a text or token ids. `n_predict`, `samplers`, `n_indent`, `t_max_predict_ms` and "
        "`response_fields` are as in `/infill`. `json_schema` is supported. `repeat_penalty` applies to all tokens.",
        media_types=(JSON, EVENTS),
    ),
    Operation(
        "/props", _props,
        access="key", summary="Describe the model and its limits (llama.cpp).",
        details="`total_slots` is `max_num_seqs`. With several models, `?model=NAME` selects one, which is loaded if "
        "necessary.",
    ),
    Operation(
        "/infill", INFILL, INFILL.body,
        access="key", summary="Fill a gap in a text (llama.cpp, as editors call it).",
        details="`input_prefix`, `input_suffix`, `input_extra` and `prompt` are the texts around the gap. The model "
        "must have tokens for a gap. `n_predict` 0 only puts the prompt into the cache. The answer ends at a line "
        "that is indented by less than `n_indent`, and after `t_max_predict_ms` milliseconds once it has a complete "
        "line. `samplers` must have the order in which Foreword applies them; samplers that are left out are turned "
        "off. Its entry `infill`, and `t_max_prompt_ms`, have no effect.",
        is_served=lambda context: context.tokenizer.infill is not None,
        media_types=(JSON, EVENTS),
    ),
)
