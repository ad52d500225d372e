"""llama.cpp's requests to fill a gap in a text, as editors send them, and the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from foreword.batch import SamplingParams
from foreword.engine import RequestOptions, RequestOutput
from foreword.engine.infill import make_infill
from foreword.fields import BOOLEAN, INTEGER, NUMBER, STRING, STRINGS, Fields, Neutral
from foreword.models.tokenizer import Tokenizer
from foreword.openai import neutral
from foreword.openai.frames import AnswerStream, encoded, json_string
from foreword.openai.request import NOTHING, Suggested, limit_of, request_options, sampling_fields
from foreword.openai.response import Body, Named, num_new_values


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRequest:
    """The body of /infill. before, after: the texts around the gap. fields: of the answer that are wanted, by their
    paths such as "timings/prompt_n"; None: all.
    """

    model: str | None
    before: str
    after: str
    params: SamplingParams
    fields: Sequence[str] | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    stream: bool = False

    def prompt(self, tokenizer: Tokenizer, max_model_len: int) -> tuple[list[int], SamplingParams]:
        """See `make_infill`."""
        return make_infill(tokenizer, self.before, self.after, self.params, max_model_len)


_HINTS = {"n_indent": INTEGER, "t_max_prompt_ms": NUMBER, "t_max_predict_ms": NUMBER, "samplers": STRINGS}
"""What llama.cpp's clients send beside the request, which changes nothing here: the page of the server says so."""


_ONE: Neutral = {"n": (1,), "best_of": (1,)}


def parse_infill(body: object, suggested: Suggested = NOTHING) -> InfillRequest:
    """The request in a body of /infill. RequestError if it cannot be served as given.

    The text of ``input_extra``, each after its file name, comes before ``input_prefix``, and ``prompt`` after that.
    """
    given = Fields(body)
    for name, kind in _HINTS.items():
        given.take(name, kind)
    extra = "".join(map(_context, given.nested_list("input_extra") or ()))
    before = extra + given.take("input_prefix", STRING, "") + given.take("prompt", STRING, "")
    request = InfillRequest(
        model=given.take("model", STRING),
        before=before,
        after=given.take("input_suffix", STRING, ""),
        params=SamplingParams(
            **sampling_fields(given, suggested, without=frozenset(_ONE)),
            max_tokens=limit_of(given, "n_predict", suggested.get("max_tokens")),
        ),
        fields=given.take("response_fields", STRINGS),
        options=request_options(given),
        stream=given.take("stream", BOOLEAN, False),
    )
    given.end({**neutral.COMPLETION, **_ONE, "id_slot": (-1, 0)})
    return request


def _context(one: Fields) -> str:
    """A part of another file, or of the same one."""
    name, text = one.take("filename", STRING, ""), one.require("text", STRING)
    one.end({"time": ()})
    return f"{name}\n{text}\n" if name else f"{text}\n"


_STOPS = {"length": "limit", "stop": "eos"}


def infill_body(request: InfillRequest, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> Body:
    """The body that answers /infill."""
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
    """The fields of a body at some paths, under these; those that it lacks are left out, as llama.cpp does."""
    found: Body = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found


class InfillStream(AnswerStream[RequestOutput]):
    """The frames of an answer to /infill."""

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
