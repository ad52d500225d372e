"""Record conversations with calls as the chat templates of models write them.

PYTHONPATH=src python tests/messages/render_calls.py DIRECTORY > tests/data/rendered_calls.json

DIRECTORY has one file NAME.jinja for each template. A recorded text begins behind the description of the tools, so it
contains nothing but the messages and the marks around them.
"""

import json
import sys
from functools import partial
from pathlib import Path

from foreword.messages import format_of_template
from foreword.models.chat import ChatTemplate

CALLS = [
    (
        "weather",
        {
            "city": 'Paris "é🙂"\n\\o/ it\'s </tool_call>',
            "days": -3,
            "ratio": 2.5,
            "on": True,
            "none": None,
            "list": [1, "a", {"b": False}],
            "where": {"at": [], "x y": "5"},
        },
    ),
    ("stop", {}),
]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name, _ in CALLS]


def conversation(content):
    """Messages of the user around an answer with calls, their results, and an answer with a further call."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(CALLS)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"result {i}"} for i in range(len(CALLS))]
    return [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": content, "tool_calls": [{**calls[1], "id": "c2"}]},
        {"role": "user", "content": "Last"},
    ]


def rendered(source):
    template, format = ChatTemplate(source, {"bos_token": "", "eos_token": ""}), format_of_template(source)
    told = None if "tools" in template.variables else format.told
    for content in ("Well.", None):  # some templates show no content beside calls
        text = template.render(
            conversation(content),
            tools=None if told else TOOLS,
            in_words=partial(told, tools=TOOLS) if told else format.in_content if template.written_call == "" else None,
            call_ids=format.call_ids,
            add_generation_prompt=False,
        )
        if "stop" in text[text.rindex("First") :]:
            break
    return {"format": format.name, "text": text[text.rindex("First") :]}


def main():
    cases = {path.stem: rendered(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.jinja"))}
    print(json.dumps({"calls": CALLS, "cases": cases}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
