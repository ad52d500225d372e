"""Bodies of OpenAI requests, parsed, and what comes of them checked and rendered as by an engine."""

import json

from foreword.jsonfile import parse_json
from foreword.openai import ChatRequest, parse_chat, parse_completion
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets.chat_messages import REQUEST, TEMPLATES, RequestErrorOf

SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a"], "presence_penalty": 0.1, "top_k": 3,
    "frequency_penalty": 0.2, "logit_bias": {"5": -1.5}, "stop_token_ids": [3], "bad_words_token_ids": [[1, 2]],
    "stream": True, "stream_options": {"include_usage": True}, "user": "u", "priority": 1, "cache_salt": "s",
}  # fmt: skip
CHAT = {
    **SAMPLING, "model": "m", "messages": REQUEST["messages"], "max_completion_tokens": 5, "logprobs": True,
    "top_logprobs": 2, "chat_template_kwargs": REQUEST["more"], "tools": REQUEST["tools"],
    "mm_processor_kwargs": {"max_pixels": 9}, "metadata": {"a": "b"}, "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}  # fmt: skip
COMPLETION = {**SAMPLING, "model": "m", "prompt": ["a", [1, 2]], "max_tokens": 5, "logprobs": 2, "echo": True}


def read(data, folder):
    body = parse_json(data, "the body", RequestErrorOf)
    parse = parse_completion if isinstance(body, dict) and "prompt" in body else parse_chat
    request = parse(body)
    request.params.check("r", vocab_size=48)
    if isinstance(request, ChatRequest):
        for template in TEMPLATES:
            template.render(request.messages, tools=request.chat["tools"], **request.chat["template"])
    elif not request.prompts:
        raise AssertionError("a completion without a prompt")


def refused():
    """Bodies that no engine may get."""
    return [json.dumps(body).encode() for body in (None, [], {**CHAT, "chat_template_kwargs": {"messages": 1}})]


TARGET = Target(lambda: [json.dumps(body).encode() for body in (CHAT, COMPLETION)], read, mutate_json, refused)
