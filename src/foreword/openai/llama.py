"""Requests of llama.cpp's interface to complete a prompt. `foreword.openai.infill` makes their answers."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.errors import RequestError
from foreword.fields import INTEGER, NUMBER, OBJECT, STRING, STRINGS, Fields, Neutral, either
from foreword.models.tokenizer import Tokenizer
from foreword.openai import neutral
from foreword.openai.infill import InfillRequest, answer_fields, check_samplers, left_out
from foreword.openai.request import IDS, NOTHING, SAMPLING, Suggested, limit_of, sampling_fields

DEFAULTS: Suggested = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's, for requests that leave them open and models that suggest nothing."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NEUTRAL: Neutral = {
    **{name: values for name, values in neutral.COMPLETION.items() if name != "repeat_penalty"},
    "best_of": (1,),
    "id_slot": (-1, 0),
    "lora": ([],),
    "n": (1,),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRequest(InfillRequest):
    """The body of /completion: an `InfillRequest` whose prompt is given."""

    given: str | list[int]

    @property
    def prompt_field(self) -> str:
        return "prompt"

    def prompt(self, tokenizer: Tokenizer, max_model_len: int) -> tuple[str | list[int], SamplingParams]:
        """Return the prompt unchanged, and its parameters."""
        return self.given, self.params


def parse_llama(body: object, suggested: Suggested = NOTHING) -> LlamaRequest:
    """Parse a body of /completion. Raise RequestError if it cannot be served as given."""
    fields = Fields(body)
    fields.take("t_max_prompt_ms", NUMBER)  # as in a body of /infill
    samplers, limit = fields.take("samplers", STRINGS), limit_of(fields, "n_predict", suggested.get("max_tokens"))
    defaults = {**DEFAULTS, **suggested}
    if samplers is not None:
        defaults = {name: value for name, value in defaults.items() if name not in left_out(samplers)}
    values = sampling_fields(fields, defaults, without=frozenset(("n", "best_of")))
    penalty = fields.take("repeat_penalty", SAMPLING["repetition_penalty"])
    if penalty is not None:
        values["repetition_penalty"] = penalty
    if (schema := fields.take("json_schema", OBJECT)) is not None:
        if "structured_outputs" in values:
            reason = "structured_outputs is given too"
            raise RequestError(None, "json_schema", schema, reason, "Give only one of them.")
        values["structured_outputs"] = StructuredOutputs.of_schema(schema, Origin("json_schema", schema))
    params = SamplingParams(**values, max_tokens=1 if limit == 0 else limit)
    check_last_n(fields, "repeat_last_n", params)
    if samplers is not None and limit != 0:
        check_samplers(samplers, params)
    prompt = fields.require("prompt", either(STRING, IDS))
    request = LlamaRequest(
        before="", after="", given=prompt, params=params, predicts=limit != 0, **answer_fields(fields)
    )
    fields.end(_NEUTRAL)
    return request


def check_last_n(fields: Fields, name: str, params: SamplingParams) -> None:
    """Raise RequestError if penalties are limited to the last tokens: here penalties count all tokens."""
    last, plain = fields.take(name, INTEGER, -1), SamplingParams()
    used = [one for one in PENALTIES if getattr(params, one) != getattr(plain, one)]
    if last != -1 and used:
        reason = f"{used[0]} is of all tokens"
        raise RequestError(None, fields.path(name), last, reason, "Give -1, or leave the penalty out.")
