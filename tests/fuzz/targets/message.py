"""Outputs of models, cut into pieces: the first byte chooses the format, the next ones the lengths of the pieces."""

import json
from pathlib import Path

from foreword.errors import ModelError
from foreword.messages import FORMATS, MessageParser, parse_message
from foreword.messages.response_template import read_response_template
from fuzz.mutations import mutate_bytes, mutate_text
from fuzz.target import Target

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "response_templates.json").read_text())["cases"]
try:
    TEMPLATES = [read_response_template(case["template"]) for case in RECORDED]
except ModelError:  # without the package regex
    TEMPLATES = []
FORMATS_BY_NUMBER = [*FORMATS.values(), *TEMPLATES]
NUM_CUTS = 8
TEXTS = (
    '<think>\nso\n</think>\n\nText <tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
    '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": "\\u00e9"}}]</tool_call>',
    '{"name": "f", "parameters": {"a": -1.5e3}}; {"type": "function", "name": "g", "parameters": {}}',
    "[f(a=1, b='it\\'s', c=[True, None, {\"x\": -1.5e3}]), g()]",
    '<|python_tag|>{"name": "f", "parameters": {"a": null}}',
    '<|channel>thought\nhm<channel|>ok<|tool_call>call:f{a:<|"|>San "F"<|"|>,n:3,o:{k:[true,<|"|>z<|"|>]}}<tool_call|>',
    "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>",
    '<think>\nso\n</think>\n\n```json\n{"name": "f", "arguments": {"a": "```"}}\n```',
    '[{"name": "f", "args": null}, {"input": "{}", "name": "g"}]',
    '<function name="f"><param name="a"><![CDATA[<b>]]></param><param name="n">1</param></function>',
    '<|inner_prefix|>so<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
    *(case["text"] for case in RECORDED),
)
WORDS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|tool_call>call:", "<tool_call|>",
    '<|"|>', "<escape>", "<start_function_call>call:", "<end_function_call>", "{", "}", "[", "]", '"', "\\", "\\u12",
    ":", ",", ";", "(", ")", "=", "'", '{"name": "f"', '"arguments": {', '"arguments": "', "name", "\n", "é🙂", "<",
    "[" * 10_000, '{"a":' * 5_000, "9" * 5_000, " " * 5_000, "<tool_call>" * 500, "<think>" * 500, '"\\' * 2_000,
    "```", '"parameters": ', "null", '<function name="', '<param name="', "<![CDATA[", "]]>", "</param>", "</function>",
    "<|tools_prefix|>", "<|tools_suffix|>",
)  # fmt: skip


def read(data, folder):
    """Parse the text in pieces and at once, and compare the results."""
    format = FORMATS_BY_NUMBER[data[0] % len(FORMATS_BY_NUMBER)] if data else FORMATS["hermes"]
    text = data[1 + NUM_CUTS :].decode("utf-8", "replace")
    cuts = [cut + 1 for cut in data[1 : 1 + NUM_CUTS]] or [1]
    parser, at, turn = MessageParser(format, call_id="c", tool_names=["f", "g"]), 0, 0
    while at < len(text):
        length = cuts[turn % len(cuts)]
        parser.push(text[at : at + length])
        at, turn = at + length, turn + 1
    parser.finish()
    assert parser.message == parse_message(text, format, call_id="c", tool_names=["f", "g"])
    json.dumps(parser.message.as_dict()).encode()


def mutate(rng, data):
    head, text = data[: 1 + NUM_CUTS], data[1 + NUM_CUTS :].decode("utf-8", "replace")
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    return bytes([rng.randrange(256) for _ in head]) + mutate_text(rng, text, WORDS).encode("utf-8", "replace")


TARGET = Target(
    valid=lambda: [
        bytes([number, 0, 1, 2, 50, 0, 0, 3, 255]) + text.encode()
        for number in range(len(FORMATS_BY_NUMBER))
        for text in TEXTS
    ],
    read=read,
    mutate=mutate,
)
