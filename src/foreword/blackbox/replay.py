"""Hold conversations with a server over HTTP, and compare each answer with that to the same prompt alone.

This file needs only the standard library. `foreword fuzz` writes a copy of it, with one conversation at its end, as the
script that shows a finding.

A prompt consists of segments of random letters, with one letter per word. Every copy of a conversation draws other
letters, so that none of its prompts is in the server's cache.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Literal
from urllib.parse import urlsplit

MAX_BODY = 64 << 20  # largest size of an answer, in bytes
MAX_WAITS = 5  # number of tries of a request that is answered with 429 or 503
Route = Literal["completions", "chat"]
Cold = Literal["cache_salt", "cache_prompt", "echo", "none"]


class ServerError(Exception):
    """The server did not answer, or its answer does not follow the interface.

    kind: a short description that is equal for equal failures. status: the HTTP status; 0 without an answer.
    """

    def __init__(self, kind: str, detail: str = "", status: int = 0) -> None:
        self.kind, self.status = kind, status
        super().__init__(f"{kind}: {detail}" if detail else kind)


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the form of its requests.

    word: form of a word of a prompt, with one place for a letter. top: log-probabilities per token; 0: none.
    cold: the way to compute a prompt without the cache. cold_is_certain: whether this was observed to work.
    tolerance: the distance, in nats, up to which answers count as equal. timeout: of a request, in seconds.
    sampled_choices: several choices are drawn at temperature 1, because the server refuses several greedy ones.
    """

    url: str
    route: Route = "completions"
    word: str = " {}"
    top: int = 5
    cold: Cold = "none"
    cold_is_certain: bool = False
    tolerance: float = 1e-3
    timeout: float = 120.0
    sampled_choices: bool = False
    api_key: str = field(default="", repr=False)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.route == "chat" else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a conversation.

    parts: (segment, number of words) of its prompt. continues: number of an earlier request whose prompt and answer
    come before these parts; −1: none. abort_after: number of events after which the stream is closed; 0: it is read to
    its end. salt: the cache is shared only between requests with equal salts; "": no salt.
    """

    parts: tuple[tuple[int, int], ...]
    max_tokens: int = 8
    n: int = 1
    model: str = ""
    salt: str = ""
    continues: int = -1
    abort_after: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Waves of requests. The requests of a wave are sent together, and the waves one after the other. Requests are
    numbered across all waves.
    """

    waves: tuple[tuple[Ask, ...], ...]

    @property
    def asks(self) -> list[Ask]:
        return [ask for wave in self.waves for ask in wave]


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer. top: text → log-probability of the most likely tokens at its position, including itself."""

    text: str
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer. tokens: empty without log-probabilities."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. num_prompt, num_cached: the tokens of the prompt, and those found in the cache; −1 if the server does
    not report them.
    """

    choices: tuple[Choice, ...]
    num_prompt: int = -1
    num_cached: int = -1


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two answers at token ``index``. distance: in nats; infinite if only texts are compared."""

    distance: float = 0.0
    index: int = 0
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        if self.distance == float("inf"):
            return f"expected {self.expected!r}, got {self.got!r}"
        return f"token {self.index}: expected {self.expected}, got {self.got} ({self.distance:.4g} nats apart)"


# -- prompts -----------------------------------------------------------------------------------------------------------


def words(target: Target, copy: str, segment: int, count: int) -> str:
    """Return the first ``count`` words of a segment in a copy of a conversation."""
    letters = random.Random(f"{copy}/{segment}").choices(string.ascii_letters, k=count)
    return "".join(map(target.word.format, letters))


def turns_of(target: Target, copy: str, asks: list[Ask], number: int, answers: Mapping[int, Answer]) -> list[str]:
    """Return the texts of a request's prompt, of user and model in turn."""
    ask, before = asks[number], []
    if ask.continues >= 0:
        if ask.continues not in answers:
            raise ServerError("not sent", f"request {ask.continues}, which it continues, has no answer")
        said = answers[ask.continues].choices[0].text
        before = [*turns_of(target, copy, asks, ask.continues, answers), said]
    return [*before, "".join(words(target, copy, *part) for part in ask.parts)]


def body_of(target: Target, copy: str, ask: Ask, turns: list[str]) -> dict[str, Any]:
    """Return the body of a request. Every copy of a conversation has its own salts."""
    draws = ask.n > 1 and target.sampled_choices
    body: dict[str, Any] = {"max_tokens": ask.max_tokens, "temperature": 1 if draws else 0}
    if ask.model:
        body["model"] = ask.model
    if target.route == "chat":
        roles = ("user", "assistant")
        body["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        if target.top:
            body |= {"logprobs": True, "top_logprobs": target.top}
    else:
        body["prompt"] = "".join(turns)
        if target.top:
            body["logprobs"] = target.top
    if ask.n > 1:
        body["n"] = ask.n
    if ask.salt:
        body["cache_salt"] = f"{ask.salt} {copy}"
    if ask.abort_after:
        body["stream"] = True
    return body


def cold_body(target: Target, copy: str, ask: Ask, turns: list[str]) -> dict[str, Any]:
    """Return the body of a request that is computed without the cache, if the server supports this."""
    body = body_of(target, copy, replace(ask, abort_after=0, n=1), turns)
    if target.cold == "cache_salt":
        body["cache_salt"] = f"cold {time.time_ns()} {random.random()}"
    elif target.cold == "cache_prompt":
        body["cache_prompt"] = False
    elif target.cold == "echo":
        body["echo"] = True
    return body


# -- HTTP --------------------------------------------------------------------------------------------------------------


def post(target: Target, body: Mapping[str, Any]) -> Answer:
    """Send a request and read its answer. Raise ServerError if there is no usable answer."""
    answer = answer_of(fetch(target, "POST", target.path, body))
    if not body.get("echo"):
        return answer
    begin = max(answer.num_prompt, 0)  # the tokens of the prompt come before those of the answer
    return replace(answer, choices=tuple(Choice(c.text, c.tokens[begin:]) for c in answer.choices))


def post_aborted(target: Target, body: Mapping[str, Any], num_events: int) -> None:
    """Begin a stream and close the connection after num_events events, or at its end."""
    until = time.monotonic() + target.timeout
    for count, event in enumerate(events(target, body, until), start=1):
        if "error" in event:
            raise ServerError("error in a stream", _message(event))
        if count >= num_events:
            return


def fetch(target: Target, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that the server answers. A busy server (429, 503) is asked again after a wait."""
    for attempt in range(MAX_WAITS + 1):
        with _sent(target, method, path, body) as response:
            data, status = _read(response, time.monotonic() + target.timeout), response.status
        if status not in (429, 503) or attempt == MAX_WAITS:
            break
        time.sleep(0.2 * 2**attempt)
    return _checked(data, status)


def events(target: Target, body: Mapping[str, Any], until: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events. Closing the iterator closes the connection."""
    with _sent(target, "POST", target.path, body) as response:
        if response.status != 200:
            _checked(_read(response, until), response.status)
        size = 0
        while True:
            line = response.readline(MAX_BODY)
            size += len(line)
            if not line:
                raise ServerError("stream ended without [DONE]")
            if time.monotonic() > until:
                raise TimeoutError
            if size > MAX_BODY:
                raise ServerError("answer too long", f"more than {MAX_BODY >> 20} MiB")
            name, _, data = line.strip().partition(b":")
            if name != b"data":
                if name not in (b"", b"event", b"id", b"retry"):
                    raise ServerError("broken stream", f"expected a line of server-sent events, got {line[:80]!r}")
                continue
            if data.strip() == b"[DONE]":
                return
            yield _checked(data, 200)


@contextmanager
def _sent(target: Target, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[HTTPResponse]:
    """Yield the response to a request over a new connection. Raise ServerError if that fails, also while the response
    is read.
    """
    at = urlsplit(target.url)
    kind = HTTPSConnection if at.scheme == "https" else HTTPConnection
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        with closing(kind(at.hostname or "", at.port, timeout=target.timeout)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with closing(connection.getresponse()) as response:
                yield response
    except TimeoutError:
        raise ServerError(f"no answer within {target.timeout:g} s") from None
    except (OSError, HTTPException) as error:
        raise ServerError("connection failed", str(error) or type(error).__name__) from None


def _read(response: HTTPResponse, until: float) -> bytes:
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise ServerError("answer too long", f"more than {MAX_BODY >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError
    if response.length:
        raise ServerError("connection failed", "closed in the middle of an answer")
    return b"".join(parts)


def _checked(data: bytes, status: int) -> dict[str, Any]:
    """Return the JSON object of an answer. Raise ServerError if it is not a JSON object, or the status is not 200."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if status != 200:
        raise ServerError(f"HTTP {status}", _message(value) if isinstance(value, dict) else repr(data[:80]), status)
    if not isinstance(value, dict):
        raise ServerError("answer is not a JSON object", repr(data[:80]))
    return value


def _message(value: Mapping[str, Any]) -> str:
    error = value.get("error", value)
    found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:300]


def base_of(url: str) -> str:
    """Return the address of a server without a slash or /v1 at its end."""
    return url.rstrip("/").removesuffix("/v1")


# -- answers -----------------------------------------------------------------------------------------------------------


def answer_of(value: Mapping[str, Any]) -> Answer:
    """Return an answer from its body. Raise ServerError if a required field is missing."""
    try:
        choices = tuple(map(_choice, value["choices"]))
        usage = value.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        counts = int(usage.get("prompt_tokens", -1)), int(details.get("cached_tokens") or 0) if details else -1
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ServerError("answer has another form", f"{type(error).__name__}: {error}") from None
    if not choices:
        raise ServerError("answer has no choices")
    return Answer(choices, *counts)


def _choice(choice: Mapping[str, Any]) -> Choice:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    logprobs, tokens = choice.get("logprobs"), []
    if logprobs and "content" in logprobs:  # the form of chats
        for entry in logprobs["content"] or ():
            top = {one["token"]: float(one["logprob"]) for one in entry["top_logprobs"]}
            tokens.append(Token(entry["token"], {**top, entry["token"]: float(entry["logprob"])}))
    elif logprobs:
        columns = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
        for name, own, top in zip(*columns, strict=True):
            tokens.append(Token(name, {} if own is None else {**(top or {}), name: float(own)}))
    return Choice(text or "", tuple(tokens))


def difference(expected: Choice, got: Choice) -> Difference:
    """Return the largest difference of two greedy answers to one prompt, up to the first token that differs.

    At a token, the distance is max |log p − log q| over the texts that either answer lists. A text that one answer does
    not list counts as likely as its least likely text. If the two took different tokens, the distance is at least half
    of the difference between the log-probabilities of the two tokens in each answer. So a difference by rounding stays
    small, because it can only change the token if both are about equally likely.
    """
    if not (expected.tokens and got.tokens):
        same = expected.text == got.text
        return Difference() if same else Difference(float("inf"), 0, expected.text, got.text)
    worst = Difference()
    for i, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        far = distance_of(a.top, b.top)
        if a.text != b.text:
            far = max(far, _given_up(a, b.text) / 2, _given_up(b, a.text) / 2)
        if far > worst.distance:
            worst = Difference(far, i, _shown(a), _shown(b))
        if a.text != b.text:
            break
    return worst


def distance_of(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """Return max |log p − log q| over the texts of both. A missing text is at most as likely as the last one."""
    if not (p and q):
        return 0.0
    least_p, least_q = min(p.values()), min(q.values())
    both = [abs(p[text] - q[text]) for text in p.keys() & q.keys()]
    only_p = [p[text] - least_q for text in p.keys() - q.keys()]
    only_q = [q[text] - least_p for text in q.keys() - p.keys()]
    return max(0.0, *both, *only_p, *only_q)


def _given_up(token: Token, other: str) -> float:
    return max(0.0, token.top[token.text] - token.top.get(other, min(token.top.values()))) if token.top else 0.0


def _shown(token: Token) -> str:
    value = token.top.get(token.text)
    return repr(token.text) if value is None else f"{token.text!r} at {value:.4f}"


def answer_difference(ask: Ask, expected: Answer, got: Answer, target: Target) -> Difference:
    """Return the difference of an answer with any number of choices from the greedy answer.

    Choices drawn at temperature 1 may differ, but the log-probabilities of their first tokens, and of tokens after
    equal tokens, must not.
    """
    reference = expected.choices[0]
    if not (ask.n > 1 and target.sampled_choices):
        found = [difference(reference, choice) for choice in got.choices]
        return max(found, key=lambda one: one.distance)
    first = [Token("", choice.tokens[0].top) for choice in (reference, *got.choices) if choice.tokens]
    if len(first) < 2:
        return Difference()
    far = max(distance_of(first[0].top, one.top) for one in first[1:])
    return Difference(far, 0, str(dict(first[0].top)), str([dict(one.top) for one in first[1:]]))


# -- conversations -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """The answers of a conversation by the requests' numbers, and the failures."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, ServerError] = field(default_factory=dict)


def hold(target: Target, copy: str, conversation: Conversation) -> Outcome:
    """Send the requests of a conversation, wave by wave."""
    asks, outcome, first = conversation.asks, Outcome(), 0
    for wave in conversation.waves:
        begin, earlier = threading.Barrier(len(wave)), dict(outcome.answers)

        def send(
            number: int, begin: threading.Barrier = begin, earlier: Mapping[int, Answer] = earlier
        ) -> Answer | ServerError | None:
            ask = asks[number]
            begin.wait()
            try:
                body = body_of(target, copy, ask, turns_of(target, copy, asks, number, earlier))
                if not ask.abort_after:
                    return post(target, body)
                post_aborted(target, body, ask.abort_after)
            except ServerError as error:
                return error
            return None

        numbers = range(first, first + len(wave))
        with ThreadPoolExecutor(len(wave)) as pool:
            for number, found in zip(numbers, pool.map(send, numbers), strict=True):
                if isinstance(found, ServerError):
                    outcome.failures[number] = found
                elif found is not None:
                    outcome.answers[number] = found
        first += len(wave)
    return outcome


def alone(target: Target, copy: str, conversation: Conversation, number: int, answers: Mapping[int, Answer]) -> Answer:
    """Return the answer to the prompt of a request, sent alone and computed without the cache if that is possible."""
    asks = conversation.asks
    return post(target, cold_body(target, copy, asks[number], turns_of(target, copy, asks, number, answers)))


def differences(
    target: Target, copy: str, conversation: Conversation, numbers: list[int]
) -> tuple[dict[int, Difference], Outcome]:
    """Hold a copy of a conversation. Return the differences of these requests that are larger than the noise, and the
    answers.

    A request without an answer has no difference. If the server was not observed to compute a prompt without its cache,
    prompts are sent alone before the conversation, so that they are not in the cache yet.
    """
    asks = conversation.asks
    found: dict[int, Difference] = {}
    before: dict[int, Answer] = {}
    if not target.cold_is_certain:
        for number in numbers:
            if asks[number].continues < 0:
                before[number] = alone(target, copy, conversation, number, {})
    outcome = hold(target, copy, conversation)
    for number in numbers:
        if number not in outcome.answers:
            continue
        expected = before.get(number) or alone(target, copy, conversation, number, outcome.answers)
        one = answer_difference(asks[number], expected, outcome.answers[number], target)
        if (
            one.distance > target.tolerance and target.cold_is_certain
        ):  # check whether the same prompt alone differs, too
            again = alone(target, copy, conversation, number, outcome.answers)
            noise = answer_difference(replace(asks[number], n=1), expected, again, target)
            if one.distance <= 3 * noise.distance:
                continue
        if one.distance > target.tolerance:
            found[number] = one
    return found, outcome


def leaked(asks: list[Ask], number: int, outcome: Outcome) -> int:
    """Return how many tokens a request found in the cache although only requests with other salts or models sent them.

    Return 0 if another request with its salt and model begins with the same segment.
    """
    ask = asks[number]
    if number not in outcome.answers or not ask.salt:
        return 0
    for other in (*asks[:number], *asks[number + 1 :]):
        if (other.salt, other.model) == (ask.salt, ask.model) and other.parts[:1] == ask.parts[:1]:
            return 0
    return max(0, outcome.answers[number].num_cached)


# -- the script --------------------------------------------------------------------------------------------------------


def main(target: Target, conversation: Conversation, number: int, *, leaks: bool = False, copies: int = 3) -> int:
    """Hold copies of a conversation and print how one of its requests is answered. Return 1 if any copy differs.

    The first argument of the command line is another URL; the variable API_KEY has a key.
    """
    target = replace(target, url=base_of(sys.argv[1] if len(sys.argv) > 1 else target.url))
    target = replace(target, api_key=os.environ.get("API_KEY", ""))
    num_wrong = 0
    for i in range(copies):
        copy = f"{time.time_ns()} {i}"
        try:
            found, outcome = differences(target, copy, conversation, [] if leaks else [number])
        except ServerError as error:
            print(f"the server failed: {error}")
            return 2
        for failed, failure in outcome.failures.items():
            print(f"copy {i}: request {failed} failed: {failure}")
        count = leaked(conversation.asks, number, outcome) if leaks else 0
        if number in found:
            print(f"copy {i}: request {number} is answered otherwise than alone: {found[number]}")
        elif count:
            print(f"copy {i}: request {number} found {count} tokens in the cache that were sent with other salts only")
        else:
            print(f"copy {i}: request {number} is answered as alone")
        num_wrong += number in found or count > 0
    print(f"{num_wrong} of {copies} copies show it")
    return int(num_wrong > 0)
