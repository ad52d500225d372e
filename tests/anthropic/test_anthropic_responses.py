"""Outputs become Anthropic's message bodies and events, as the public client reads them."""

import json

import pytest

import anthropic
from answers import CALLS, THOUGHT, cuts, outputs, transport
from foreword.anthropic import MessageStream, error_body, message_body, parse_messages

NAMED = {"response_id": "7", "created": 1700000000, "model": "m"}
ASK = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
REQUEST = parse_messages(ASK)


def client(answer, status=200):
    return anthropic.Anthropic(api_key="k", max_retries=0, http_client=transport(answer, status))


def streamed(pieces, **options) -> anthropic.types.Message:
    frames = MessageStream(REQUEST, **NAMED)
    body = MessageStream.keep_alive + b"".join(frames.frames(output) for output in outputs(pieces, **options))
    with client(body).messages.stream(**ASK) as stream:
        return stream.get_final_message()


def whole(text, request=REQUEST, **options) -> anthropic.types.Message:
    *_, last = outputs([text], **options)
    return client(message_body(request, last, **NAMED)).messages.create(**ASK)


@pytest.mark.smoke
def test_a_message_has_thinking_text_and_calls():
    message = whole(f"{THOUGHT}I look.\n{CALLS}", cached=3)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("Let me see.", "I look.")
    assert (first.name, first.input) == ("weather", {"city": "Paris é</tool_call>"})
    assert (second.name, second.input, first.id != second.id) == ("time", {}, True)
    assert (message.id, message.role, message.model, message.stop_reason) == ("msg_7", "assistant", "m", "tool_use")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 3, 1)
    assert usage.output_tokens_details.thinking_tokens == 3


@pytest.mark.parametrize(
    "text", ["Hello.", f"{THOUGHT}Yes.", f"{THOUGHT}I look.\n{CALLS}", CALLS, "", "\u2028 \ud83d\ude00"]
)
def test_a_stream_adds_up_to_the_whole_message(text):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    expected = whole(text, prompt=5).to_dict(exclude_none=True)
    for pieces in cuts(text) if text else [[]]:
        found = streamed(pieces).to_dict(exclude_none=True)
        assert {**found, "usage": None} == {**expected, "usage": None}


def test_usage_of_a_stream_counts_every_token():
    usage = streamed(["a", "b", "c"], cached=4).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 4, 3)


@pytest.mark.parametrize(
    ("options", "reason", "sequence"),
    [
        ({"reason": "stop"}, "end_turn", None),
        ({"reason": "stop", "stop_reason": 5}, "end_turn", None),
        ({"reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"reason": "length"}, "model_context_window_exceeded", None),
        ({"reason": "abort"}, None, None),
    ],
)
def test_why_it_ended(options, reason, sequence):
    for message in (whole("a", **options), streamed(["a"], **options)):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    short = parse_messages({**ASK, "max_tokens": 1})
    assert whole("a", short, reason="length").stop_reason == "max_tokens"


def test_a_call_that_was_cut_is_no_valid_input():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    (block,) = whole(text, reason="length").content
    assert block.input == {"INVALID_JSON": '{"city": "Par'}


def test_events_come_in_the_documented_order():
    frames = MessageStream(REQUEST, **NAMED)
    body = b"".join(frames.frames(output) for output in outputs([THOUGHT, "Yes.\n", CALLS]))
    events = []
    for frame in body.decode("ascii").strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    order = [(event["type"], event.get("index")) for event in events if event["type"] != "content_block_delta"]
    blocks = [(f"content_block_{part}", i) for i in range(4) for part in ("start", "stop")]
    assert order == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[2] == {"type": "tool_use", "id": starts[2]["id"], "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("status", "kind", "caught"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.APIStatusError),
        (415, "invalid_request_error", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.APIStatusError),
    ],
)
def test_an_error_is_the_exception_of_its_status(status, kind, caught):
    with pytest.raises(caught) as found:
        client(error_body(status, "because"), status).messages.create(**ASK)
    assert found.value.body["error"] == {"type": kind, "message": "because"}
