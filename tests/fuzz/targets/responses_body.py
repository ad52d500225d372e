"""Bodies of OpenAI's Responses API, parsed, and the conversation rendered."""

import json

from foreword.jsonfile import parse_json
from foreword.openai import parse_responses
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets.chat_messages import TEMPLATES, RequestErrorOf

ITEMS = [
    {"role": "developer", "content": "Be kind"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "1", "output": "sunny"},
]  # fmt: skip
BODY = {
    "model": "m", "input": ITEMS, "instructions": "Be brief", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}], "store": False,
    "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False, "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
    "stream": True, "stream_options": {"include_obfuscation": False}, "truncation": "disabled", "top_k": 3, "seed": 1,
    "priority": 1, "cache_salt": "s", "chat_template_kwargs": {"x": 1}, "user": "u", "reasoning": {"effort": None},
    "mm_processor_kwargs": {"max_pixels": 9},
}  # fmt: skip
PLAIN = {"input": "one", "tools": BODY["tools"]}


def read(data, folder):
    request = parse_responses(parse_json(data, "the body", RequestErrorOf))
    json.dumps(request.echo)
    request.chat.params.check("r", vocab_size=48)
    for template in TEMPLATES:
        template.render(request.chat.messages, tools=request.chat.chat["tools"], **request.chat.chat["template"])


def refused():
    """Bodies that no engine may get."""
    return [json.dumps(body).encode() for body in (None, [], {**BODY, "previous_response_id": "resp_1"})]


TARGET = Target(lambda: [json.dumps(body).encode() for body in (BODY, PLAIN)], read, mutate_json, refused)
