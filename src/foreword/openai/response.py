"""Convert the outputs of the engine to OpenAI's response bodies."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from foreword.arrays import I32
from foreword.engine import CompletionOutput, RequestOutput
from foreword.messages import Message
from foreword.openai.request import ChatRequest, CompletionRequest
from foreword.sampling import TokenLogprobs

Body = dict[str, Any]

Listing = Callable[[Iterable[Any]], Any]
"""The type that a body has for many items: `list`, or `iter` for a body that is written in pieces; see
`foreword.server.pieces`.
"""

LEAST_LOGPROB = -9999.0
"""Stands for −∞, which JSON cannot write; OpenAI's value for "too unlikely"."""


class Named(TypedDict):
    """The values that every body of a response has. created: seconds since 1970."""

    response_id: str
    created: int
    model: str


class Detokenizer(Protocol):
    """Incremental decoding of tokens, and their places in the text; see `foreword.models.detokenizer.Detokenizer`."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def places(self, token_ids: Sequence[int]) -> list[int]: ...


class Tokens(Protocol):
    """The methods of a tokenizer that log-probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        prompt: Sequence[int] | I32 = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer: ...


def chat_completion(
    request: ChatRequest, output: RequestOutput, tokens: Tokens, *, listed: Listing = list, **named: Unpack[Named]
) -> Body:
    """Return the body of an answer to /v1/chat/completions. listed: makes the lists of choices and log-probabilities.

    A request that failed (``output.error``) has no such body; see `foreword.openai.errors`.
    """
    count = request.params.logprobs or 0
    choices = (
        {
            "index": completion.index,
            "message": _message(completion),
            "logprobs": chat_logprobs(completion.token_ids, completion.logprobs, count, tokens, listed),
            "finish_reason": finish_reason(completion),
        }
        for completion in output.outputs
    )
    return _body("chat.completion", "chatcmpl", named, listed(choices), [output])


def text_completion(
    request: CompletionRequest,
    outputs: Sequence[RequestOutput],
    tokens: Tokens,
    *,
    listed: Listing = list,
    **named: Unpack[Named],
) -> Body:
    """Return the body of an answer to /v1/completions. outputs: one per prompt; their choices are in this order.
    listed: makes the lists of choices and log-probabilities.
    """

    def choices() -> Iterator[Body]:
        every = ((output, completion) for output in outputs for completion in output.outputs)
        for index, (output, completion) in enumerate(every):
            choice = TextChoice(request, output, tokens)
            text, token_ids, entries = completion.text, completion.token_ids, completion.logprobs
            yield {
                "index": index,
                "text": choice.beginning + text,
                "logprobs": choice.logprobs(text, token_ids, entries, is_final=True, listed=listed),
                "finish_reason": completion.finish_reason,
            }

    return _body("text_completion", "cmpl", named, listed(choices()), outputs)


def _body(kind: str, prefix: str, named: Named, choices: object, outputs: Sequence[RequestOutput]) -> Body:
    return {**head(kind, prefix, named), "choices": choices, "usage": usage(outputs)}


def head(kind: str, prefix: str, named: Named) -> Body:
    """Return the fields at the beginning of bodies and chunks."""
    response_id = f"{prefix}-{named['response_id']}"
    return {"id": response_id, "object": kind, "created": named["created"], "model": named["model"]}


def _message(completion: CompletionOutput) -> Body:
    """Return the message of a chat: its content is null if it has only tool calls."""
    message = completion.message or Message(completion.text)
    found = {**message.as_dict(), "refusal": None}
    if message.tool_calls and not message.content:
        found["content"] = None
    return found


def finish_reason(completion: CompletionOutput) -> str | None:
    """Return the finish reason of a choice of a chat."""
    calls = completion.message is not None and completion.message.tool_calls
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def usage(outputs: Sequence[RequestOutput]) -> Body:
    """Return the numbers of tokens: prompt, cached prompt, completion and reasoning tokens, and drafts of speculation
    that were right (completion tokens, too) and wrong.

    loaded_tokens: the cached tokens that were read from disk or from the host's memory, by the name of the tier.
    cache_miss: why and where the reuse of one prompt ends, if that is not at its last token.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(c.num_tokens for output in outputs for c in output.outputs)
    cached: Body = {"cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs)}
    loaded = Counter[str]()
    for output in outputs:
        loaded.update(output.metrics.loaded_tokens)
    if loaded:
        cached["loaded_tokens"] = dict(loaded)
    if len(outputs) == 1 and (miss := outputs[0].metrics.cache_miss) is not None:
        cached["cache_miss"] = {"reason": miss.public().reason, "position": miss.position}
    reasoning = sum(c.reasoning_tokens or 0 for output in outputs for c in output.outputs)
    accepted = sum(output.metrics.num_accepted_drafts for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(o.metrics.num_proposed_drafts for o in outputs) - accepted,
        },
    }


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
    num_alternatives: int,
    tokens: Tokens,
    listed: Listing = list,
) -> Body | None:
    """Return the log-probabilities of tokens of a chat. logprobs: an entry per token, or None."""
    if logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> Body:
        raw = tokens.token_bytes(token_id)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    def of_token(chosen: int, known: TokenLogprobs) -> Body:
        found = known.by_token()
        likely = sorted(found, key=found.__getitem__, reverse=True)[:num_alternatives]
        return {**entry(chosen, found[chosen]), "top_logprobs": [entry(token, found[token]) for token in likely]}

    return {"content": listed(map(of_token, token_ids, logprobs)), "refusal": None}


class TextChoice:
    """Read the outputs of a choice of /v1/completions. beginning: the beginning of its text, which is the prompt if it
    is echoed.

    A token is reported together with the text that it belongs to, when its place in the text is certain.
    """

    def __init__(self, request: CompletionRequest, output: RequestOutput, tokens: Tokens) -> None:
        wants_logprobs, self._tokens = request.params.logprobs is not None, tokens
        prompt = text_of_prompt(output, tokens) if request.echo or wants_logprobs else ""
        self.beginning = prompt if request.echo else ""
        self._start = self._num_chars = len(prompt)
        self._detokenizer = _after_prompt(request, output, tokens) if wants_logprobs else None
        self._ids: list[int] = []  # tokens that are not reported yet
        self._entries: list[TokenLogprobs | None] = []
        self._places: list[int] = []
        if request.echo and output.prompt_logprobs is not None:
            self._ids, self._entries = [*output.prompt_token_ids], [*output.prompt_logprobs]
            self._places = _places_in_prompt(output, prompt, tokens)

    def logprobs(
        self,
        text: str,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs] | None,
        *,
        is_final: bool,
        listed: Listing = list,
    ) -> Body | None:
        """Add new text, tokens and entries. Return the log-probabilities of the tokens whose place is certain now; None
        if they are not requested. is_final: nothing follows.
        """
        self._num_chars += len(text)
        if entries is None or self._detokenizer is None:
            return None
        ids = token_ids[: len(entries)]
        self._ids += ids
        self._entries += entries
        self._places += [self._start + place for place in self._detokenizer.places(ids)[:-1]]
        count = len(self._ids) if is_final else bisect_left(self._places, self._num_chars)
        found = self._body(count, listed)
        del self._ids[:count], self._entries[:count], self._places[:count]
        return found

    def _body(self, count: int, listed: Listing) -> Body:
        """Return the log-probabilities of the first tokens. Tokens that a stop string cut off are placed at the end of
        the text.
        """
        ids, entries, places, end = self._ids[:count], self._entries[:count], self._places[:count], self._num_chars
        return {
            "tokens": listed(_text(self._tokens.token_bytes(token_id)) for token_id in ids),
            "token_logprobs": listed(None if found is None else _finite(found.chosen.logprob) for found in entries),
            "top_logprobs": listed(None if found is None else _by_text(found, self._tokens) for found in entries),
            "text_offset": listed(min(place, end) for place in places),
        }


def _after_prompt(request: CompletionRequest, output: RequestOutput, tokens: Tokens) -> Detokenizer:
    """Return the decoder of an output. If a prompt of token ids ends inside a character, the decoder completes it."""
    params = request.params
    spaces = params.spaces_between_special_tokens
    prompt = output.prompt_token_ids if output.prompt is None else ()
    return tokens.detokenizer(
        params.skip_special_tokens, continues=True, spaces_between_special_tokens=spaces, prompt=prompt
    )


def _places_in_prompt(output: RequestOutput, prompt: str, tokens: Tokens) -> list[int]:
    """Return the places of a prompt's tokens in its text. Tokens and text are aligned at their ends, because the prompt
    may have been cut, or may begin with a token that is not in the text.
    """
    detokenizer = tokens.detokenizer(output.prompt is None)
    *places, end = detokenizer.places(output.prompt_token_ids)
    return [min(max(place + len(prompt) - end, 0), len(prompt)) for place in places]


def _by_text(found: TokenLogprobs, tokens: Tokens) -> dict[str, float]:
    """Return, for each text, the largest value of the tokens with this text, such as bytes that are not characters."""
    largest: dict[str, float] = {}
    for token_id, logprob in found.by_token().items():
        text = _text(tokens.token_bytes(token_id))
        largest[text] = max(largest.get(text, LEAST_LOGPROB), logprob)
    return largest


def text_of_prompt(output: RequestOutput, tokens: Tokens) -> str:
    """Return the text of a prompt. For token ids, an incomplete character at the end is left out, because the output
    has it.
    """
    return tokens.detokenizer().push(output.prompt_token_ids) if output.prompt is None else output.prompt


def num_values(outputs: Iterable[RequestOutput]) -> int:
    """Count the values of final outputs: the tokens and, with log-probabilities, the listed alternatives of each."""
    return sum(_num_values(output) for output in outputs)


def _num_values(output: RequestOutput) -> int:
    tokens = sum(completion.num_tokens * _width(completion.transcript.logprobs) for completion in output.outputs)
    return tokens + len(output.prompt_token_ids) * _width(output.prompt_logprobs)


def num_new_values(output: RequestOutput) -> int:
    """Count the same values in the new part of an output."""
    return sum((one.end.tokens - one.start.tokens) * _width(one.transcript.logprobs) for one in output.outputs)


def _width(logprobs: Sequence[TokenLogprobs | None] | None) -> int:
    """Return the number of values of one token, with its alternatives if there are any."""
    return 1 if not logprobs else 1 + len(logprobs[-1] or ())


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
