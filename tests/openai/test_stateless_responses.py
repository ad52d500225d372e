"""Bodies of OpenAI's Responses API without stored state, and their answers as the public client reads them."""

import json

import pytest
from openai.types.responses import ResponseCreateParams

import openai
from answers import CALLS, THOUGHT, cuts, outputs, transport
from foreword import SamplingParams
from foreword.errors import RequestError
from foreword.openai import ResponseStream, parse_responses, response_body

NAMED = {"response_id": "7", "created": 1700000000, "model": "m"}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
ASK = {"model": "m", "input": "Hi", "tools": [TOOL], "instructions": "Be brief", "metadata": {"a": "b"}}
REQUEST = parse_responses(ASK)


def parse(**given):
    return parse_responses({"model": "m", "input": "Hi", **given})


def refusal(**given) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**given)
    return caught.value


def texts(*found):
    return [{"type": "text", "text": text} for text in found]


@pytest.mark.smoke
def test_a_plain_body():
    request = parse(stream=True, temperature=0.5, top_p=0.9, max_output_tokens=7, top_k=5).chat
    assert request.messages == [{"role": "user", "content": texts("Hi")}]
    assert request.params == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, top_k=5)
    assert (request.model, request.stream, request.chat["tools"]) == ("m", True, None)
    assert parse().chat.params == SamplingParams(max_tokens=None)


def test_images_are_parts_with_urls():
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
    items = [{"role": "user", "content": [image, {"type": "input_text", "text": "What?"}]}]
    part = {"type": "image_url", "image_url": {"url": image["image_url"]}}
    assert parse(input=items).chat.messages == [{"role": "user", "content": [part, *texts("What?")]}]


def test_items_of_a_conversation_with_calls():
    part = {"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather?"}, {"type": "input_text", "text": "Now"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert parse(input=items, instructions="Be brief").chat.messages == [
        {"role": "system", "content": texts("Be brief", "Be kind")},
        {"role": "user", "content": texts("Weather?", "Now")},
        {
            "role": "assistant",
            "content": texts("Looking."),
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": texts("So?")},
    ]


def test_tools_and_their_choice_have_the_form_of_chats():
    chat = parse(tools=[TOOL], tool_choice={"type": "function", "name": "weather"}).chat.chat
    function = {"name": "weather", "parameters": TOOL["parameters"], "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_a_schema_of_the_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    direct = parse(structured_outputs={"json": schema}).chat.params
    assert parse(text={"format": format}).chat.params == direct != parse(text={"format": {"type": "text"}}).chat.params


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:", "detail": "low"}]}]},
            "input[0].content[0].detail",
        ),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"inputs": "x"}, "inputs"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_path(given, field):
    assert refusal(**given).field == field


def test_what_clients_send_by_default_is_accepted():
    body = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "store": False,
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
    }
    assert parse(**body).chat.params == parse().chat.params


def test_every_field_of_the_client_is_known():
    """With a value of no valid type, each is refused for its type or as not supported, never as unknown."""
    names = {name for params in ResponseCreateParams.__args__ for name in params.__annotations__}
    assert len(names) > 20
    for name in names:
        assert refusal(**{name: 1.5} if name not in ("temperature", "top_p") else {name: []}).reason != "unknown field"


def client(answer):
    return openai.OpenAI(api_key="k", base_url="http://x", max_retries=0, http_client=transport(answer))


def whole(text, **options):
    *_, last = outputs([text], **options)
    return client(response_body(REQUEST, last, **NAMED)).responses.create(**ASK)


def frames_of(pieces, **options) -> bytes:
    stream = ResponseStream(REQUEST, **NAMED)
    return b"".join(stream.frames(output) for output in outputs(pieces, **options))


def streamed(pieces, **options):
    with client(frames_of(pieces, **options)).responses.stream(**{**ASK, "tools": []}) as stream:
        return stream.get_final_response()


def test_a_response_has_reasoning_a_message_and_calls():
    response = whole(f"{THOUGHT}I look.\n{CALLS}", cached=3)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "Let me see."
    assert (response.output_text, message.role, message.status) == ("I look.", "assistant", "completed")
    assert (first.name, json.loads(first.arguments)) == ("weather", {"city": "Paris é</tool_call>"})
    assert (second.name, second.arguments, second.call_id != first.call_id) == ("time", "{}", True)
    assert len({item.id for item in response.output}) == 4
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 1, 6)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 3)
    assert (response.id, response.status, response.model, response.created_at) == ("resp_7", "completed", "m", 1.7e9)
    assert (response.instructions, response.metadata, response.store) == ("Be brief", {"a": "b"}, False)


@pytest.mark.parametrize("text", ["Hello.", f"{THOUGHT}Yes.", f"{THOUGHT}I look.\n{CALLS}", CALLS, "\u2028"])
def test_a_stream_adds_up_to_the_whole_response(text):
    expected = whole(text)
    for pieces in cuts(text):
        found = streamed(pieces)
        assert [item.to_dict(exclude_none=True) for item in found.output] == [
            item.to_dict(exclude_none=True) for item in expected.output
        ]
        assert (found.status, found.usage.output_tokens) == ("completed", len(pieces))


def test_events_are_numbered_and_complete():
    events = [
        json.loads(frame.split("\n")[1].removeprefix("data: "))
        for frame in frames_of([THOUGHT, "Yes.\n", CALLS]).decode("ascii").strip().split("\n\n")
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (kinds[:2], kinds[-1]) == (["created", "in_progress"], "completed")
    for kind in ("output_item", "content_part"):
        assert kinds.count(f"{kind}.added") == kinds.count(f"{kind}.done") == (4 if kind == "output_item" else 2)
    for name in ("output_text", "reasoning_text", "function_call_arguments"):
        deltas = "".join(event["delta"] for event in events if event["type"] == f"response.{name}.delta")
        done = [event for event in events if event["type"] == f"response.{name}.done"]
        assert deltas == "".join(event.get("text", event.get("arguments")) for event in done)
        assert {event["item_id"] for event in done} == {
            event["item_id"] for event in events if event["type"] == f"response.{name}.delta"
        }


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", "completed"), ("length", "incomplete"), ("abort", "cancelled")]
)
def test_why_it_ended(reason, status):
    for response in (whole("a", reason=reason), streamed(["a"], reason=reason) if reason == "stop" else None):
        if response is not None:
            assert response.status == status
    details = whole("a", reason=reason).incomplete_details
    assert (details.reason if details else None) == ("max_output_tokens" if reason == "length" else None)
    last = frames_of(["a"], reason=reason).decode().strip().split("\n\n")[-1]
    assert last.startswith(f"event: response.{'completed' if reason == 'stop' else 'incomplete'}\n")


def test_an_item_that_was_cut_is_incomplete():
    (call,) = whole('<tool_call>\n{"name": "weather", "arguments": {"city": "Par', reason="length").output
    assert (call.status, call.arguments) == ("incomplete", '{"city": "Par')
