"""Requests of llama.cpp's interface to fill a gap in a text, as editors send them, and their answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from foreword.batch import SamplingParams
from foreword.engine import RequestOptions, RequestOutput
from foreword.engine.infill import make_infill
from foreword.engine.outputs import Position
from foreword.errors import RequestError
from foreword.fields import BOOLEAN, INTEGER, NUMBER, STRING, STRINGS, Fields, Kind, Neutral, either, list_of
from foreword.models.tokenizer import Tokenizer
from foreword.openai import neutral
from foreword.openai.frames import AnswerStream, encoded, json_string
from foreword.openai.request import NOTHING, Suggested, limit_of, request_options, sampling_fields
from foreword.openai.response import Body, Named, num_new_values


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRequest:
    """The body of /infill. before, after: the texts around the gap. fields: the requested fields of the answer, as
    paths such as "timings/prompt_n"; None: all. indent, predict_ms: see `LineEnd`. predicts: False for ``n_predict`` 0,
    with which editors put a prompt into the cache.
    """

    model: str | None
    before: str
    after: str
    params: SamplingParams
    indent: int = 0
    predict_ms: float = 0
    predicts: bool = True
    fields: Sequence[str] | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    stream: bool = False

    @property
    def prompt_field(self) -> str:
        """Return the field of the body that errors about the prompt name."""
        return "input_prefix"

    def prompt(self, tokenizer: Tokenizer, max_model_len: int) -> tuple[str | list[int], SamplingParams]:
        """Return the prompt and the parameters for the engine: see `make_infill`."""
        return make_infill(tokenizer, self.before, self.after, self.params, max_model_len)


_SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "temperature": ("temperature",),
    "min_p": ("min_p",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "typ_p": ("typical_p",),
    "xtc": ("xtc_probability",),
    "infill": (),  # editors always send it; in Foreword, the model's own tokens end a gap
}
"""llama.cpp's samplers in the order in which they are applied here, with the parameters that turn them on."""
_MOST_INDENT = 1 << 16
INDENT = Kind(
    f"an integer from 0 to {_MOST_INDENT}",
    lambda value: INTEGER.accepts(value) and 0 <= value <= _MOST_INDENT,
    {"type": "integer", "minimum": 0, "maximum": _MOST_INDENT},
)
_TIME = either(NUMBER, list_of(NUMBER, "a list of numbers"))
_ONE: Neutral = {"n": (1,), "best_of": (1,)}


def parse_infill(body: object, suggested: Suggested = NOTHING) -> InfillRequest:
    """Parse a body of /infill. Raise RequestError if it cannot be served as given.

    The prompt consists of the texts of ``input_extra``, each after its file name, then ``input_prefix``, then
    ``prompt``.
    """
    fields = Fields(body)
    fields.take("t_max_prompt_ms", NUMBER)  # llama.cpp reads this field and does not apply it, either
    samplers, limit = fields.take("samplers", STRINGS), limit_of(fields, "n_predict", suggested.get("max_tokens"))
    if samplers is not None:
        suggested = {name: value for name, value in suggested.items() if name not in left_out(samplers)}
    params = SamplingParams(
        **sampling_fields(fields, suggested, without=frozenset(_ONE)), max_tokens=1 if limit == 0 else limit
    )
    if samplers is not None and limit != 0:
        check_samplers(samplers, params)
    extra = "".join(map(_context, fields.nested_list("input_extra") or ()))
    before = extra + fields.take("input_prefix", STRING, "") + fields.take("prompt", STRING, "")
    after: str = fields.take("input_suffix", STRING, "")
    request = InfillRequest(before=before, after=after, params=params, predicts=limit != 0, **answer_fields(fields))
    fields.end({**neutral.COMPLETION, **_ONE, "id_slot": (-1, 0)})
    return request


def answer_fields(fields: Fields) -> dict[str, Any]:
    """Take the fields of `InfillRequest` that say which model answers, and how, out of a body of llama.cpp."""
    return {
        "model": fields.take("model", STRING),
        "indent": fields.take("n_indent", INDENT, 0),
        "predict_ms": fields.take("t_max_predict_ms", NUMBER, 0),
        "fields": fields.take("response_fields", STRINGS),
        "options": request_options(fields),
        "stream": fields.take("stream", BOOLEAN, False),
    }


def left_out(samplers: Sequence[str]) -> set[str]:
    """Return the parameters of the samplers that are not in the list."""
    return {parameter for name, parameters in _SAMPLERS.items() if name not in samplers for parameter in parameters}


def check_samplers(samplers: Sequence[str], params: SamplingParams) -> None:
    """Raise RequestError unless the samplers are those that the parameters use, in the order of their application."""
    for name in samplers:
        if name not in _SAMPLERS:
            fix = f"Give some of {', '.join(_SAMPLERS)}, in this order."
            raise RequestError(None, "samplers", name, "is not supported", fix)
    if list(samplers) != (order := [name for name in _SAMPLERS if name in samplers]):
        reason = f"are not {json.dumps(order)}, as they are applied"
        raise RequestError(None, "samplers", samplers, reason, "Give these, or leave the field out.")
    plain = SamplingParams()
    for name, parameters in _SAMPLERS.items():
        for parameter in parameters:
            value = getattr(params, parameter)
            if name not in samplers and value != getattr(plain, parameter):
                fix = f"Add {name} to samplers, or leave {parameter} out."
                raise RequestError(None, parameter, value, f"is given, and samplers lacks {name}", fix)


def _context(one: Fields) -> str:
    """Return the text of a part of another file, or of the same file."""
    name, text = one.take("filename", STRING, ""), one.require("text", STRING)
    one.take("time", _TIME)  # the time of the snippet has no effect on the model
    one.end()
    return f"{name}\n{text}\n" if name else f"{text}\n"


class LineEnd:
    """Find where a completion ends before the model ends it, as llama.cpp does for ``n_indent`` and
    ``t_max_predict_ms``. It ends at a line, except the first, that begins with fewer than ``indent`` spaces and tabs.
    It also ends ``predict_ms`` after the first token, as soon as the text contains an end of a line. A value of 0 or
    less turns the rule off.

    The text arrives in pieces. clock: returns seconds.
    """

    def __init__(self, indent: int, predict_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = re.compile(rf"\n[ \t]{{0,{indent - 1}}}(?=[^ \t])") if indent > 0 else None
        self._seconds, self._clock = predict_ms / 1000, clock
        self._until: float | None = None
        self._has_line = False
        self._margin = ""  # the last end of a line and the spaces after it, until text follows

    def find(self, piece: str) -> int | None:
        """Return how many characters of the piece belong to the completion, or None if the completion does not end in
        it.
        """
        now, text = self._clock(), self._margin + piece
        if self._until is None:
            self._until = now + self._seconds
        if self._line is not None and (found := self._line.search(text)) is not None:
            return found.end() - len(self._margin)
        margin = text[text.rfind("\n") :] if "\n" in text else ""
        self._has_line, self._margin = self._has_line or bool(margin), "" if margin.strip() else margin
        return len(piece) if self._has_line and self._seconds > 0 and now > self._until else None


def cut(output: RequestOutput, pieces: Sequence[str], num_tokens: int) -> RequestOutput:
    """Return a final output with only its first tokens and another text, as if the token limit had ended it.

    pieces: the pieces of the text, all except the last were in earlier outputs.
    """
    [last] = output.outputs
    transcript = replace(last.transcript, pieces=[*pieces], token_ids=last.token_ids[:num_tokens])
    start = Position(max(len(pieces) - 1, 0), min(last.start.tokens, num_tokens))
    end = Position(len(pieces), num_tokens)
    ended = replace(last, transcript=transcript, start=start, end=end, finish_reason="length", stop_reason=None)
    return replace(output, outputs=[ended])


_STOPS = {"length": "limit", "stop": "eos"}


def infill_body(request: InfillRequest, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> Body:
    """Return the body of an answer to /infill or /completion."""
    [output] = outputs
    [completion] = output.outputs
    whole: Body = {
        "content": completion.text,
        "tokens": [],
        "stop": True,
        "model": named["model"],
        "tokens_predicted": len(completion.token_ids),
        "tokens_evaluated": len(output.prompt_token_ids),
        "stop_type": "word" if isinstance(completion.stop_reason, str) else _STOPS.get(str(completion.finish_reason)),
        "truncated": False,
        "timings": {"prompt_n": len(output.prompt_token_ids), "predicted_n": len(completion.token_ids)},
    }
    return whole if request.fields is None else _chosen(whole, request.fields)


def _chosen(whole: Mapping[str, Any], paths: Sequence[str]) -> Body:
    """Return the fields of a body at some paths, under these paths. Fields that the body lacks are left out, as in
    llama.cpp.
    """
    found: Body = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found


class InfillStream(AnswerStream[RequestOutput]):
    """The frames of an answer to /infill or /completion."""

    def __init__(self, request: InfillRequest, **named: Unpack[Named]) -> None:
        self._request, self._named = request, named
        self._last: RequestOutput | None = None

    def frames(self, output: RequestOutput) -> bytes:
        if output.finished:
            self._last = output
        text = "".join([completion.new_text for completion in output.outputs])
        return encoded(f'data: {{"content":{json_string(text)},"stop":false}}\n\n') if text else b""

    def size(self, output: RequestOutput) -> int:
        return num_new_values(output)

    def end(self) -> bytes:
        if self._last is None:
            return b""
        body = {**infill_body(self._request, [self._last], **self._named), "content": ""}
        return encoded(f"data: {json.dumps(body, separators=(',', ':'))}\n\n")
