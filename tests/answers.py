"""Outputs of an engine for a given text, in pieces, and clients whose server is a function."""

from collections.abc import Iterable, Iterator

import httpx2

from foreword.engine import CompletionOutput, RequestMetrics, RequestOutput
from foreword.engine.outputs import BEGINNING, Transcript
from foreword.messages import MessageParser, format_named

THOUGHT = "<think>Let me see.</think>\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\u00e9</tool_call>"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def outputs(
    pieces: Iterable[str],
    *,
    reason: str = "stop",
    stop_reason: int | str | None = None,
    cached: int = 0,
    prompt: int = 5,
) -> Iterator[RequestOutput]:
    """Yield what a stream of a chat yields: an output per piece, then the final one. Each piece is one token."""
    parser = MessageParser(format_named("hermes"), tool_names=["weather", "time"], call_id="call_")
    transcript, before = Transcript(), BEGINNING

    def output(events, finish_reason=None, **more) -> RequestOutput:
        completion = CompletionOutput(
            0, transcript, before, transcript.end, finish_reason=finish_reason, events=tuple(events), **more
        )
        metrics = RequestMetrics(0.0, num_cached_tokens=cached)
        return RequestOutput("r", "p", [1] * prompt, [completion], finished=finish_reason is not None, metrics=metrics)

    for piece in pieces:
        before = transcript.end
        transcript.pieces.append(piece)
        transcript.token_ids.append(7)
        yield output(parser.push(piece))
    before = transcript.end
    events = parser.finish()
    message = parser.message
    num = None if message.reasoning is None else 3
    yield output(events, reason, stop_reason=stop_reason, message=message, reasoning_tokens=num)


def transport(answer: bytes | dict, status: int = 200) -> httpx2.Client:
    """An HTTP client whose server always answers this: a stream of events, or a JSON body."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if isinstance(answer, bytes):
            return httpx2.Response(status, content=answer, headers={"content-type": "text/event-stream"})
        return httpx2.Response(status, json=answer)

    return httpx2.Client(transport=httpx2.MockTransport(handle))


def cuts(text: str) -> Iterator[list[str]]:
    """The text as a whole, in single characters, and in pieces of seven."""
    for size in (len(text), 1, 7):
        yield [text[i : i + size] for i in range(0, len(text), size)]
