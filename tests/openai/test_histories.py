"""Conversations as clients send them back, in every dialect: they go on, and errors name the body that was sent."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletionMessage

from foreword.anthropic import parse_messages
from foreword.errors import RequestError
from foreword.models.chat import ChatTemplate
from foreword.openai import parse_chat, parse_responses
from foreword.openai.conversation import Conversation
from foreword.server.generation import named

LLAMA = (
    "{%- for m in messages %}{%- if not (m.role == 'tool' or 'tool_calls' in m) %}[{{ m.role }}]{{ m.content }}"
    "{%- elif 'tool_calls' in m %}{%- if not m.tool_calls | length == 1 %}{{ raise_exception('one call only') }}"
    "{% endif %}[call {{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{%- else %}[result]{{ m.content }}{%- endif %}{%- endfor %}"
)
"""In the form of Llama 3's templates, which ask whether there are calls by the presence of the field."""
TEMPLATE = ChatTemplate(LLAMA, {})
ARGUMENTS = {
    "": {}, " ": {}, None: {}, "null": {}, "{}": {}, '{"a": 1}': {"a": 1},
    '{"city": "Pa': {"INVALID_JSON": '{"city": "Pa'}, "[1]": {"INVALID_JSON": "[1]"},
}  # fmt: skip


def rendered(request):
    return TEMPLATE.render(request.messages)


def chat(arguments):
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", arguments)]}
    return parse_chat({"messages": [user("a"), message, {"role": "tool", "tool_call_id": "1", "content": "x"}]})


def responses(arguments):
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    items = [user("a"), called, {"type": "function_call_output", "call_id": "1", "output": "x"}]
    return parse_responses({"input": items}).chat


def messages(arguments):
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": arguments}]}
    result = user([{"type": "tool_result", "tool_use_id": "1", "content": "x"}])
    return parse_messages({"model": "m", "max_tokens": 5, "messages": [user("a"), used, result]})


def user(content):
    return {"role": "user", "content": content}


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


DIALECTS = pytest.mark.parametrize("dialect", [chat, responses, messages])


@DIALECTS
@pytest.mark.parametrize("given", ARGUMENTS)
def test_any_arguments_of_a_call_are_the_same_in_every_dialect(dialect, given):
    assert rendered(dialect(given)) == f"[user]a[call f{json.dumps(ARGUMENTS[given])}][result]x"


@DIALECTS
def test_arguments_may_be_an_object_or_absent(dialect):
    assert "[call f{}]" in rendered(dialect({}))
    assert '[call f{"a": 1}]' in rendered(dialect({"a": 1}))
    assert "[call f" + json.dumps({"INVALID_JSON": "{"}) in rendered(dialect({"INVALID_JSON": "{"}))


@pytest.mark.parametrize(
    ("dialect", "field"),
    [(chat, "messages[1].tool_calls[0].function.arguments"), (responses, "input[1].arguments"),
     (messages, "messages[1].content[0].input")],
)  # fmt: skip
def test_wrong_arguments_are_named_as_they_were_sent(dialect, field):
    with pytest.raises(RequestError) as caught:
        answered(dialect, 5)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = 5: ")


def answered(dialect, arguments):
    request = dialect(arguments)
    with named(request.origins):
        return rendered(request)


def dumped(**fields):
    return ChatCompletionMessage.model_validate({"role": "assistant", **fields}).model_dump()


LITELLM = {
    "role": "assistant", "content": "b", "tool_calls": None, "function_call": None, "annotations": None, "audio": None,
    "provider_specific_fields": {"refusal": None}, "reasoning_content": None, "thinking_blocks": None,
}  # fmt: skip
PLAIN = [
    dumped(content="b"), dumped(content="b", tool_calls=None), {"role": "assistant", "content": "b", "tool_calls": []},
    LITELLM, {"role": "assistant", "content": "b", "name": None, "refusal": None},
    {"role": "assistant", "content": [{"type": "text", "text": "b", "annotations": [], "id": "msg_1", "index": 0}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip
CALLING = [
    dumped(content=None, tool_calls=[call("f", '{"a": 1}')]),
    {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": 1})]},
    {"role": "assistant", "tool_calls": [{**call("f", '{"a": 1}'), "index": 0}], "function_call": None},
    {**LITELLM, "content": None, "tool_calls": [{"function": {"arguments": '{"a": 1}', "name": "f"}, "id": "1"}]},
]  # fmt: skip


@pytest.mark.parametrize("message", PLAIN)
def test_a_plain_answer_comes_back_as_clients_dump_it(message):
    assert rendered(parse_chat({"messages": [user("a"), message, user("c")]})) == "[user]a[assistant]b[user]c"


@pytest.mark.parametrize("message", CALLING)
def test_a_call_comes_back_as_clients_dump_it(message):
    result = {"role": "tool", "tool_call_id": "1", "content": "x", "name": None}
    expected = '[user]a[call f{"a": 1}][result]x'
    assert rendered(parse_chat({"messages": [user("a"), message, result]})) == expected


CODEX = {
    "model": "m", "instructions": "Be brief", "store": False, "stream": True, "reasoning": None,
    "include": ["reasoning.encrypted_content"],
    "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "k",
    "tools": [
        {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": {"type": "object"}}
    ],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None,
         "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls', "call_id": "1", "id": None},
        {"type": "function_call_output", "call_id": "1", "output": None},
    ],
}  # fmt: skip
CLAUDE = {
    "model": "m", "max_tokens": 9, "stream": True, "metadata": {"user_id": "u"}, "temperature": 1, "thinking": None,
    "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tools": [{"name": "shell", "description": "d", "input_schema": {"type": "object"}, "cache_control": None}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "b", "citations": None},
            {"type": "tool_use", "id": "1", "name": "shell", "input": {"INVALID_JSON": '{"command": ["ls'}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("request_", [parse_responses(CODEX).chat, parse_messages(CLAUDE)], ids=["codex", "claude"])
def test_agents_go_on_after_a_cut_call(request_):
    told = '[call shell{"INVALID_JSON": "{\\"command\\": [\\"ls"}][result]'
    assert rendered(request_) == f"[system]Be brief[user]a{told}"


@pytest.mark.parametrize(
    ("request_", "field", "origin"),
    [
        (parse_responses(CODEX).chat, "messages[0].content[0]", "instructions"),
        (parse_responses(CODEX).chat, "messages[1].content[0].text", "input[0].content[0].text"),
        (parse_responses(CODEX).chat, "messages[2].content[0]", "input[2].content[0]"),
        (parse_responses(CODEX).chat, "messages[3].content", "input[4].output.content"),
        (parse_responses(CODEX).chat, "messages", "input"),
        (parse_responses(CODEX).chat, "prompt", "input"),
        (parse_responses(CODEX).chat, "tools[0].function.parameters", "tools[0].parameters"),
        (parse_responses(CODEX).chat, "tools[10].function", "tools[10].function"),
        (parse_messages(CLAUDE), "messages[0].content[0]", "system[0]"),
        (parse_messages(CLAUDE), "messages[1].content[0]", "messages[0].content[0]"),
        (parse_messages(CLAUDE), "tools[0].function.parameters", "tools[0].input_schema"),
        (parse_messages(CLAUDE), "tools[0].function.strict", "tools[0].strict"),
        (parse_messages(CLAUDE), "parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ],
)  # fmt: skip
def test_every_part_of_a_conversation_has_its_path_in_the_body(request_, field, origin):
    error = RequestError("r", field, 1, "is wrong", "Correct it.").renamed(request_.origins)
    assert (error.field, str(error)) == (origin, f"request 'r': {origin} = 1: is wrong. Correct it.")


def test_a_piece_of_a_message_does_not_copy_those_before():
    """So that the time of a body of many small pieces is in proportion to their number."""
    conversation = Conversation()
    conversation.text("user", "a", "[0]")
    parts = conversation.messages[0]["content"]
    conversation.text("user", "b", "[1]")
    assert conversation.messages[0]["content"] is parts
    assert [part["text"] for part in parts] == ["a", "b"]
    for i in range(3):
        conversation.reasoning(f"{i} ", f"[{i + 2}]")
    conversation.result("1", "c", "[5]")
    conversation.reasoning("again", "[6]")
    found = [message.get("reasoning_content") for message in conversation.messages]
    assert found == [None, "0 1 2 ", None, "again"]
