"""Outputs of the engine become the response bodies of OpenAI's published schema."""

import json
from types import SimpleNamespace

import pytest

from foreword.engine import RequestMetrics
from foreword.errors import EngineError, RequestError
from foreword.messages import Message, ToolCall
from foreword.models.detokenizer import Detokenizer
from foreword.openai import chat_completion, error_body, parse_chat, parse_completion, text_completion
from foreword.sampling import BadLogitsError, Logprob, TokenLogprobs

NAMED = {"response_id": "7", "created": 1700000000, "model": "m"}


class Letters:
    """Token i is the i-th letter from "a"; 30 is the first byte of "é"."""

    skips_first_space = False

    def __getitem__(self, token_id: int) -> bytes:
        return b"\xc3" if token_id == 30 else bytes([96 + token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return self[token_id]

    def detokenizer(self, *args, **options) -> Detokenizer:
        return Detokenizer(self)


def known(entries):
    """The log-probabilities of a token."""
    return TokenLogprobs(None, entries=entries)


def output(*completions, prompt="ab", prompt_logprobs=None, cached=0):
    """The part of a `RequestOutput` that responses read."""
    metrics = RequestMetrics(0.0, num_cached_tokens=cached)
    fields = {"prompt": prompt, "prompt_token_ids": [1, 2], "prompt_logprobs": prompt_logprobs, "metrics": metrics}
    return SimpleNamespace(outputs=list(completions), error=None, **fields)


def completed(index=0, reason="stop", logprobs=None, message=None, reasoning_tokens=None):
    """The part of a `CompletionOutput` that responses read."""
    fields = {"text": "cd", "token_ids": [3, 4], "finish_reason": reason, "logprobs": logprobs, "message": message}
    return SimpleNamespace(index=index, num_tokens=2, reasoning_tokens=reasoning_tokens, **fields)


def chat_body(*completions, **fields):
    request = parse_chat({"messages": [{"role": "user", "content": "ab"}], **fields})
    return chat_completion(request, output(*completions, cached=1), Letters(), **NAMED)


def test_half_a_character_at_the_end_of_a_prompt_is_in_no_text_unless_the_output_completes_it():
    def text(token_ids, written):
        choice = SimpleNamespace(**{**vars(completed()), "token_ids": token_ids, "text": written})
        outputs = SimpleNamespace(**{**vars(output(choice, prompt=None)), "prompt_token_ids": [1, 30]})
        return text_body([outputs], echo=True)["choices"][0]["text"]

    assert text([73], "é") == "aé"
    assert text([3], "c") == "ac"
    assert text([], "") == "a"


def text_body(outputs, **fields):
    return text_completion(parse_completion({"prompt": "ab", **fields}), outputs, Letters(), **NAMED)


@pytest.mark.smoke
def test_a_chat_completion_has_the_published_form():
    body = chat_body(completed(reasoning_tokens=2), completed(1, "length", reasoning_tokens=3))
    assert body == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": "cd", "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, reason in ((0, "stop"), (1, "length"))
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {
                "reasoning_tokens": 5,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }
    assert json.loads(json.dumps(body)) == body


def test_a_message_has_its_calls_and_reasoning():
    call = ToolCall("call_1", "f", '{"a": 1}')
    (choice,) = chat_body(completed(message=Message("", "why", (call,))))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "why",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    (choice,) = chat_body(completed(reason="length", message=Message("so", None, (call,))))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "so")


def test_log_probabilities_of_a_chat():
    found = [
        known(
            {3: Logprob(-1.5, 3), 5: Logprob(-0.1, 1), 30: Logprob(-0.7, 2)}
        ),  # the chosen token is not among the first 2
        known({4: Logprob(float("-inf"), 1), 5: Logprob(float("-inf"), 1)}),
    ]
    body = chat_body(completed(logprobs=found), logprobs=True, top_logprobs=2)
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "c",
        "logprob": -1.5,
        "bytes": [99],
        "top_logprobs": [
            {"token": "e", "logprob": -0.1, "bytes": [101]},
            {"token": "\ufffd", "logprob": -0.7, "bytes": [0xC3]},
        ],
    }
    assert second["logprob"] == -9999.0
    json.dumps(body, allow_nan=False)
    (only,) = chat_body(completed(logprobs=found[:1]), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert only["top_logprobs"] == []


def test_a_text_completion_has_the_published_form():
    body = text_body([output(completed(), completed(1)), output(completed())])
    assert (body["id"], body["object"]) == ("cmpl-7", "text_completion")
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["choices"][0] == {"index": 0, "text": "cd", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 6


def test_of_tokens_with_one_text_the_most_likely_is_reported():
    """A byte that is not a character has the text of any other such byte; lm-eval asks if a token is the largest."""
    logprobs = [known({3: Logprob(-2.0, 2), 130: Logprob(-1.0, 1), 131: Logprob(-3.0, 3)})]
    (choice,) = text_body([output(completed(logprobs=logprobs))], logprobs=2)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"c": -2.0, "\N{REPLACEMENT CHARACTER}": -1.0}]


def test_log_probabilities_of_a_text():
    found = [known({3: Logprob(-1.0, 2), 5: Logprob(-0.5, 1)}), known({4: Logprob(-2.0, 1)})]
    (choice,) = text_body([output(completed(logprobs=found))], logprobs=1)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["c", "d"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"c": -1.0, "e": -0.5}, {"d": -2.0}],
        "text_offset": [2, 3],
    }


@pytest.mark.parametrize("prompt", ["ab", None])
def test_an_echo_begins_with_the_prompt(prompt):
    assert text_body([output(completed(), prompt=prompt)], echo=True)["choices"][0]["text"] == "abcd"
    found, of_prompt = (
        [known({3: Logprob(-1.0, 1)}), known({4: Logprob(-2.0, 1)})],
        [None, known({2: Logprob(-3.0, 1)})],
    )
    outputs = [output(completed(logprobs=found), prompt=prompt, prompt_logprobs=of_prompt)]
    (choice,) = text_body(outputs, echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -1.0, -2.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_an_error_says_which_parameter_is_wrong():
    status, body = error_body(RequestError(None, "temperature", 5, "must be smaller", "Lower it."))
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "temperature"
    assert body["error"]["code"] is None
    assert "must be smaller" in body["error"]["message"]
    for failure in (EngineError("broken"), BadLogitsError("r", 3)):
        status, body = error_body(failure)
        assert (status, body["error"]["type"], body["error"]["param"]) == (500, "server_error", None)
