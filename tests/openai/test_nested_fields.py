"""Every nested object of a body of every dialect is read field by field: an unknown key is refused by its path."""

from __future__ import annotations

import json

import pytest

from foreword.anthropic import parse_messages
from foreword.batch import SamplingParams
from foreword.errors import RequestError
from foreword.openai import parse_chat, parse_completion, parse_responses

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
ALLOWED = {"type": "function", "function": {"name": "f"}}
CHATS = [
    CHAT,
    {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    },
    {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
    {**CHAT, "response_format": {"type": "text"}},
    {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ALLOWED]}}},
    {**CHAT, "structured_outputs": {"json": SCHEMA}},
]
COMPLETION = {key: CHATS[1][key] for key in ("stream", "stream_options", "response_format")} | {"prompt": "a"}
RESPONSES = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
}
EPHEMERAL = {"type": "ephemeral", "ttl": "5m"}
MESSAGES = {
    "model": "m",
    "max_tokens": 2000,
    "metadata": {"user_id": "u"},
    "cache_control": EPHEMERAL,
    "system": [{"type": "text", "text": "Be brief", "cache_control": EPHEMERAL}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True, "cache_control": EPHEMERAL}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}, "cache_control": EPHEMERAL},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}],
        },
    ],
}  # fmt: skip
FREE = ("schema", "parameters", "input_schema", "input", "json", "structured_outputs")
"""Objects whose keys are not fields of the body; those of structured_outputs are checked elsewhere."""
OF_TEMPLATES = "messages"
"""Objects of chats that the chat template reads; their checks are in tests/models/test_chat.py."""


def objects(value, path=""):
    """The nested objects of a body, by their paths."""
    if isinstance(value, dict):
        for name, item in value.items():
            at = f"{path}.{name}" if path else name
            if name not in FREE:
                if isinstance(item, dict):
                    yield at
                yield from objects(item, at)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield f"{path}[{i}]"
        yield from objects(item, f"{path}[{i}]")


def with_key(body, path, key):
    changed = json.loads(json.dumps(body))
    at = changed
    for step in path.replace("[", ".").replace("]", "").split("."):
        at = at[int(step) if step.isdigit() else step]
    at[key] = "y"
    return changed


CASES = [
    (parse, body, path)
    for parse, bodies in (
        (parse_chat, CHATS), (parse_completion, [COMPLETION]), (parse_responses, [RESPONSES]),
        (parse_messages, [MESSAGES]),
    )
    for body in bodies
    for path in dict.fromkeys(objects(body))
    if not (parse is parse_chat and path.startswith(OF_TEMPLATES))
]  # fmt: skip


@pytest.mark.parametrize(("parse", "body", "path"), CASES, ids=[f"{case[0].__name__}-{case[2]}" for case in CASES])
def test_an_unknown_key_of_a_nested_object_is_refused(parse, body, path):
    parse(body)
    with pytest.raises(RequestError, match="unknown field") as caught:
        parse(with_key(body, path, "xtra"))
    assert caught.value.field == f"{path}.xtra"


def test_the_hint_names_the_key():
    given = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strcit": True}}
    with pytest.raises(RequestError, match=r"response_format\.json_schema\.strcit = True.*Did you mean 'strict'\?$"):
        parse_chat({**CHAT, "response_format": given})


def test_a_schema_of_any_form_is_followed():
    """llama.cpp's json_object with a schema, OpenAI's json_schema, the Responses API's, Anthropic's: one value."""
    chats = [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "schema": SCHEMA, "strict": False}},
    ]
    plain = {name: value for name, value in CHAT.items() if name not in ("tools", "tool_choice")}
    found = [parse_chat({**plain, "response_format": given}).params.structured_outputs for given in chats]
    found += [
        parse_responses({"input": "a", "text": {"format": chats[0]}}).chat.params.structured_outputs,
        parse_responses(RESPONSES).chat.params.structured_outputs,
        parse_messages(MESSAGES).params.structured_outputs,
    ]
    assert [one.origin.field for one in found] == [
        "response_format.schema", "response_format.json_schema.schema", "response_format.json_schema.schema",
        "text.format.schema", "text.format.schema", "output_config.format.schema",
    ]  # fmt: skip
    assert len(set(found)) == 1
    assert found[0].mapping() == {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA},
        {"type": "json_object", "nonsense": 1},
    ],
)
def test_a_schema_is_never_dropped(given):
    with pytest.raises(RequestError, match="unknown field"):
        parse_chat({**CHAT, "response_format": given})


def test_structural_tags_of_vllm_are_followed():
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    plain = {"messages": CHAT["messages"]}
    asked = parse_chat({**plain, "response_format": {"type": "structural_tag", **tag}}).params.structured_outputs
    assert asked == parse_chat({**plain, "structured_outputs": {"structural_tag": tag}}).params.structured_outputs


def test_a_choice_among_some_tools_has_one_form():
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ALLOWED]}}
    assert parse_chat(CHATS[4]).chat["tool_choice"] == chosen == parse_responses(RESPONSES).chat.chat["tool_choice"]


def test_tools_are_given_on_without_nulls_and_labels():
    tool = {"type": "function", "cache_control": EPHEMERAL, "function": {"description": None, **FUNCTION, "return": {}}}
    (given,) = parse_chat({**CHAT, "tools": [tool]}).chat["tools"]
    assert given == {"type": "function", "function": {**FUNCTION, "return": {}}}


class Unread(list):
    """A list whose entries must not be looked at."""

    def __iter__(self):
        raise AssertionError("an entry was looked at")


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("stop", 1024),
        ("bad_words", 1024),
        ("dry_sequence_breakers", 1024),
        ("bad_words_token_ids", 1024),
        ("stop_token_ids", 1 << 19),
        ("allowed_token_ids", 1 << 19),
        ("dry_breaker_token_ids", 1 << 19),
    ],
)
def test_a_list_with_too_many_entries_is_refused_before_one_is_looked_at(field, most):
    given = Unread([0] * (most + 1))
    with pytest.raises(RequestError, match=f"{field} = .*: has {most + 1} entries, more than {most}"):
        parse_completion({"prompt": "a", field: given})


def test_a_map_with_too_many_entries_is_refused_and_one_with_as_many_as_allowed_is_not():
    allowed = {str(i): 1 for i in range(1 << 14)}
    assert len(parse_completion({"prompt": "a", "logit_bias": allowed}).params.logit_bias) == 1 << 14
    with pytest.raises(RequestError, match=r"logit_bias = .*: has 16385 entries, more than 16384"):
        parse_completion({"prompt": "a", "logit_bias": {**allowed, "x": 1}})


def test_the_stop_sequences_of_messages_have_the_limit_of_stop():
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(RequestError, match=r"stop_sequences = .*: has 1025 entries, more than 1024"):
        parse_messages({**body, "stop_sequences": ["a"] * 1025})


def test_more_token_ids_than_the_vocabulary_has_are_refused_by_their_number():
    for field, value in (("allowed_token_ids", [1] * 11), ("logit_bias", dict.fromkeys(range(11), 1.0))):
        with pytest.raises(RequestError, match=f"{field} = .*: has 11 token ids, and the vocabulary 10"):
            SamplingParams(**{field: value}).check("a", 10)
