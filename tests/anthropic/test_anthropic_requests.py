"""Bodies of Anthropic's Messages API become conversations and sampling parameters, or errors that name the field."""

import pytest
from anthropic.types import MessageCountTokensParams, MessageCreateParams

from foreword import SamplingParams
from foreword.anthropic import parse_count, parse_messages
from foreword.errors import RequestError

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}


def parse(**given):
    return parse_messages({"model": "m", "max_tokens": 9, "messages": USER, **given})


def refusal(**given) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**given)
    return caught.value


def texts(*found):
    return [{"type": "text", "text": text} for text in found]


@pytest.mark.smoke
def test_a_plain_body():
    request = parse()
    assert request.messages == [{"role": "user", "content": texts("Hi")}]
    assert request.params == SamplingParams(max_tokens=9)
    assert (request.model, request.stream, request.chat["tools"]) == ("m", False, None)


def test_sampling_fields_reach_their_parameters():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a", "b"], "min_p": 0.1, "seed": 7}
    expected = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, stop=["a", "b"], min_p=0.1, seed=7, max_tokens=9)
    assert parse(**given).params == expected


def test_a_system_prompt_is_a_text_or_blocks():
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    assert parse(system="Be brief").messages[0] == {"role": "system", "content": texts("Be brief")}
    assert parse(system=blocks).messages[0] == {"role": "system", "content": texts("Be", "brief")}
    assert parse(system="").messages == parse().messages


def test_blocks_of_a_conversation_with_tools():
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": texts("no", "city")},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "user", "content": "Tell."},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert parse(messages=messages).messages == [
        {"role": "user", "content": texts("Weather?")},
        {
            "role": "assistant",
            "content": texts("Looking."),
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "1", **call},
                {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no\ncity"},
        {"role": "user", "content": texts("So?", "Tell.")},
    ]


def test_tools_have_the_form_of_chats():
    (tool,) = parse(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}]).chat["tools"]
    (strict,) = parse(tools=[{**TOOL, "strict": True}]).chat["tools"]
    assert strict == {**tool, "function": {**tool["function"], "strict": True}}
    function = {"name": "weather", "description": "of a city", "parameters": TOOL["input_schema"]}
    assert tool == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}, True),
    ],
)
def test_the_choice_of_a_tool(given, choice, parallel):
    chat = parse(tools=[TOOL], tool_choice=given).chat
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (choice, parallel)


def test_thinking_is_asked_of_the_template():
    def asked(**thinking):
        return parse(max_tokens=2000, thinking=thinking).chat["thinking"]

    assert asked(type="enabled", budget_tokens=1024) is True
    assert asked(type="disabled") is False
    assert asked(type="adaptive") is None
    for budget in (1023, 2000):
        error = refusal(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": budget})
        assert error.field == "thinking.budget_tokens"


def test_a_schema_of_the_output():
    schema = {"type": "object"}
    request = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert request.params.structured_outputs == parse(structured_outputs={"json": schema}).params.structured_outputs
    assert request.params.structured_outputs is not None


def test_images_are_parts_with_urls():
    urls = "data:image/png;base64,aGk=", "https://example.com/a.png"
    base64 = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    sources = base64, {"type": "url", "url": urls[1]}
    content = [{"type": "image", "source": source, "cache_control": {"type": "ephemeral"}} for source in sources]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert parse(messages=messages).messages == [{"role": "user", "content": [*parts, *texts("What?")]}]


def test_labels_change_nothing_and_null_counts_as_absent():
    assert parse(metadata={"user_id": "u"}, cache_control={"type": "ephemeral"}, service_tier="auto") == parse()
    assert parse(system=None, tools=None, thinking=None, container=None) == parse()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": [IMAGE]}, *USER]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type"),
        ({"messages": [*USER, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"messages": []}, "messages"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"container": "x"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_path(given, field):
    assert refusal(**given).field == field


def test_what_clients_send_by_default_is_accepted():
    body = {
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }
    plain = {"model": "m", "max_tokens": 5, "messages": USER}
    assert parse_messages({**plain, **body}).params == parse_messages(plain).params


def test_every_field_of_the_client_is_known():
    """With a value of no valid type, each is refused for its type or as not supported, never as unknown."""
    names = {name for params in MessageCreateParams.__args__ for name in params.__annotations__}
    assert len(names) > 15
    for name in names:
        assert refusal(**{name: 1.5}).reason != "unknown field", name


def test_tokens_of_a_conversation_are_counted_without_parameters():
    body = {"model": "m", "messages": USER, "system": "Be brief", "tools": [TOOL], "thinking": {"type": "disabled"}}
    request, message = parse_count(body), parse_messages({**body, "max_tokens": 5})
    assert (request.messages, request.chat) == (message.messages, message.chat)
    with pytest.raises(RequestError, match="max_tokens"):
        parse_count({**body, "max_tokens": 5})
    for name in MessageCountTokensParams.__annotations__:
        with pytest.raises(RequestError) as caught:
            parse_count({**body, name: 1.5})
        assert caught.value.reason != "unknown field", name
