"""Bodies of Anthropic's Messages API, parsed, and the conversation rendered."""

import json

from foreword.anthropic import parse_count, parse_messages
from foreword.jsonfile import parse_json
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets.chat_messages import TEMPLATES, RequestErrorOf

CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}, **CACHED}
TURNS = [
    {"role": "user", "content": "one"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "two"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "so", **CACHED},
        ],
    },
]
COUNT = {
    "model": "m", "messages": TURNS, "system": [{"type": "text", "text": "Be brief.", **CACHED}], "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}  # fmt: skip
BODY = {
    **COUNT, "max_tokens": 2000, "stop_sequences": ["a"], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1,
    "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True,
    "service_tier": "auto", "logit_bias": {"5": -1.5}, "priority": 1, "cache_salt": "s",
    "chat_template_kwargs": {"x": 1},
}  # fmt: skip


def read(data, folder):
    body = parse_json(data, "the body", RequestErrorOf)
    parse = parse_messages if isinstance(body, dict) and "max_tokens" in body else parse_count
    request = parse(body)
    request.params.check("r", vocab_size=48)
    for template in TEMPLATES:
        template.render(request.messages, tools=request.chat["tools"], **request.chat["template"])


def refused():
    """Bodies that no engine may get."""
    return [json.dumps(body).encode() for body in (None, [], {**BODY, "chat_template_kwargs": {"messages": 1}})]


TARGET = Target(lambda: [json.dumps(body).encode() for body in (BODY, COUNT)], read, mutate_json, refused)
