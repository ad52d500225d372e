"""Frames of streams are valid JSON in UTF-8 for every text."""

import json
from types import SimpleNamespace

import pytest

from answers import outputs
from foreword.anthropic import MessageStream, parse_messages
from foreword.messages import ContentDelta
from foreword.openai import (
    ChatStream,
    CompletionStream,
    ResponseStream,
    error_frame,
    parse_chat,
    parse_completion,
    parse_responses,
)

NAMED = {"response_id": "7", "created": 1700000000, "model": "m\udc80"}
TEXTS = ["é", "\U0001f600", '"\n\x00', "\ud83d", "a\udc80b", "\N{LINE SEPARATOR}"]


def output(text):
    """The part of a `RequestOutput` that a stream reads before the end."""
    tokens = {"new_token_ids": [1], "new_logprobs": None}
    completion = SimpleNamespace(
        index=0, new_text=text, events=(ContentDelta(text),), finish_reason=None, message=None, **tokens
    )
    return SimpleNamespace(outputs=[completion], prompt="ab", prompt_index=0, finished=False)


SEPARATORS = [char for char in map(chr, range(0x3000)) if len(f"a{char}b".splitlines()) > 1 and char not in "\r\n"]
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "chat": lambda: ChatStream(parse_chat(ASK), None, **NAMED),
    "completion": lambda: CompletionStream(parse_completion({"prompt": "ab"}), None, **NAMED),
    "response": lambda: ResponseStream(parse_responses({"input": "Hi"}), **NAMED),
    "message": lambda: MessageStream(parse_messages({"model": "m", "max_tokens": 9, **ASK}), **NAMED),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_readers_that_end_lines_as_unicode_does_see_the_lines_of_a_stream(kind):
    text = "".join(SEPARATORS)
    assert {"\x85", "\u2028", "\u2029"} < set(text)
    stream = STREAMS[kind]()
    data = b"".join(map(stream.frames, outputs([f"a{text}b", "c"]))) + stream.end()
    lines = data.decode().splitlines()
    assert lines == data.decode().split("\n")[:-1]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert json.dumps(f"a{text}b")[1:-1] in json.dumps(bodies)
    failure = error_frame({"error": text}).decode()
    assert failure.splitlines() == failure.split("\n")[:-1]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_read_back(text):
    chat = ChatStream(parse_chat({"messages": [{"role": "user", "content": "ab"}]}), None, **NAMED)
    _, chunk = map(json.loads, frames(chat.frames(output(text))))
    assert chunk["choices"][0]["delta"]["content"] == text
    completion = CompletionStream(parse_completion({"prompt": "ab"}), None, **NAMED)
    (chunk,) = map(json.loads, frames(completion.frames(output(text))))
    assert chunk["choices"][0]["text"] == text
    (error,) = map(json.loads, frames(error_frame({"error": text})))
    assert error == {"error": text}


def frames(data: bytes) -> list[str]:
    return [frame.removeprefix("data: ") for frame in data.decode().split("\n\n")[:-1]]
