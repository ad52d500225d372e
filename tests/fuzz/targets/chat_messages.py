"""Messages, tools and template variables of a request, in a template that uses all of them."""

import json

from foreword.errors import RequestError
from foreword.jsonfile import parse_json
from foreword.models.chat import ChatTemplate
from fuzz.mutations import mutate_json
from fuzz.target import Target
from fuzz.targets import chat_template

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
REQUEST = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ],
    "tools": chat_template.TOOLS,
    "more": {"enable_thinking": True, "documents": [{"title": "x", "text": "y"}]},
}
SOURCE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role + (m.content or '') }}{{ m.tool_calls }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}{{ documents }}{{ enable_thinking }}"
)
TEMPLATES = [ChatTemplate(source, {"bos_token": "<s>"}) for source in (SOURCE, *chat_template.VALID)]


def read(data, folder):
    request = parse_json(data, "the request", RequestErrorOf)
    if isinstance(request, dict):
        more = request.get("more")
        more = (
            {k: v for k, v in more.items() if k not in ("messages", "tools", "self")} if isinstance(more, dict) else {}
        )
        for template in TEMPLATES:
            template.render(request.get("messages"), tools=request.get("tools"), **more)


class RequestErrorOf(RequestError):
    def __init__(self, text):
        super().__init__(None, "body", "", text, "")


TARGET = Target(lambda: [json.dumps(REQUEST).encode()], read, mutate_json)
