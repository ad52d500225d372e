"""Response templates of Hugging Face give the messages that transformers gives."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import ModelError
from foreword.messages import parse_message
from foreword.messages.response_template import read_response_template
from messages.rig import CUTS, in_pieces

pytest.importorskip("regex")
CASES = json.loads((Path(__file__).parents[1] / "data" / "response_templates.json").read_text())["cases"]


def as_transformers(message):
    found = {"role": message.role, "content": message.content, "thinking": message.reasoning}
    found["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in message.tool_calls
    ]
    return {key: value for key, value in found.items() if value}


@pytest.mark.parametrize("case", CASES)
@given(cuts=CUTS)
def test_a_message_is_that_of_transformers(case, cuts):
    format = read_response_template(case["template"])
    message = in_pieces(case["text"], cuts, format, prompt=case["prompt"])
    assert as_transformers(message) == case["message"]


TEMPLATES = list({json.dumps(case["template"]): case["template"] for case in CASES}.values())
WORDS = sorted({word for case in CASES for word in case["text"].replace("<", " <").replace(">", "> ").split()})


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=CUTS)
def test_any_cutting_gives_the_same_message(template, words, cuts):
    format, text = read_response_template(template), " ".join(words)
    assert in_pieces(text, cuts, format) == parse_message(text, format, call_id="c")


CALLING = {"open": "<c>", "close": "</c>", "content": "json", "repeats": True}
FORMS = {
    "as it is": {},
    "keys": {"transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}}},
    "whole": {"content_args": {"allow_non_json": True}},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@given(key=st.sampled_from(["arguments", "parameters", "args", "input"]), cuts=CUTS, left=st.integers(0, 4))
def test_calls_are_read_as_in_the_built_in_formats(form, key, cuts, left):
    """Arguments under any usual key, none at all, a closing mark that is cut, and calls without marks."""
    fields = {"content": {}, "tool_calls": {**CALLING, **FORMS[form]}}
    format = read_response_template({"start_anchor": "A:", "fields": fields})
    for written, arguments in (('{"a": 1}', {"a": 1}), ("null", {}), ('"{\\"a\\": 1}"', {"a": 1}), ('""', {})):
        call = f'{{"name": "f", "{key}": {written}}}'
        for text in (f"<c>{call}{'</c>'[:left]}", call if form != "whole" else f"<c>{call}</c>"):
            message = in_pieces(text, cuts, format, tool_names=["f"])
            (found,) = message.tool_calls
            assert (found.name, json.loads(found.arguments), found.error) == ("f", arguments, None)
            assert message.content == ""
    message = in_pieces('<c>{"name": "f", "city": "Paris"}</c>', cuts, format, tool_names=["f"])
    assert "Paris" in message.content + "".join(call.arguments for call in message.tool_calls)
    assert all(call.error is not None for call in message.tool_calls)


SMALL = {"start_anchor": "A:", "fields": {"content": {"close": "<end>"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "not an object with fields"),
        ({"version": 2}, "unknown version"),
        ({"start_anchor": ""}, "start_anchor"),
        ({"fields": {}}, "not an object with fields"),
        ({"fields": {"citations": {}}}, "not supported.*citations"),
        ({"fields": {"content": {}, "thinking": {}}}, "several fields"),
        ({"fields": {"content": {"close": []}}}, "wrong close"),
        ({"fields": {"content": {"close_pattern": "("}}}, "invalid pattern"),
        ({"fields": {"tool_calls": {"content": "json"}}}, "without an opening mark"),
        ({"fields": {"tool_calls": {"open": "<t>", "content": "yaml"}}}, "unknown content parser"),
        ({"fields": {"tool_calls": {"open": "<t>", "content": "xml-inline"}}}, "invalid pattern|without a group"),
        (
            {"fields": {"tool_calls": {"open": "<t>", "content": "json", "content_args": {"string_delims": [1]}}}},
            "string_delims",
        ),
    ],
)
def test_a_wrong_template_is_refused(change, message):
    template = {**SMALL, **change} if isinstance(change, dict) else change
    with pytest.raises(ModelError, match=message):
        read_response_template(template)


def test_a_pattern_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "regex", None)
    with pytest.raises(ModelError, match=r"Install foreword\[templates\]"):
        read_response_template({"start_anchor": "A:", "fields": {"content": {"open_pattern": "a+"}}})
