"""Frames of streams are valid JSON in UTF-8 for every text."""

import json
from types import SimpleNamespace

import pytest

from foreword.messages import ContentDelta
from foreword.openai import ChatStream, CompletionStream, error_frame, parse_chat, parse_completion

NAMED = {"response_id": "7", "created": 1700000000, "model": "m\udc80"}
TEXTS = ["é", "\U0001f600", '"\n\x00', "\ud83d", "a\udc80b", "\N{LINE SEPARATOR}"]


def output(text):
    """What a stream reads of a `RequestOutput` that goes on."""
    tokens = {"new_token_ids": [1], "new_logprobs": None}
    completion = SimpleNamespace(
        index=0, new_text=text, events=(ContentDelta(text),), finish_reason=None, message=None, **tokens
    )
    return SimpleNamespace(outputs=[completion], prompt="ab", prompt_index=0, finished=False)


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
