"""The parser: messages that models wrote come back, however their text is cut, and damaged text is not lost."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreword.messages import (
    FORMATS,
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    MessageParser,
    ReasoningDelta,
    parse_message,
)
from messages.rig import ARGUMENTS, CALLS, CUTS, NAMES, PROSE, THINKS, WRITERS, format_of, in_pieces

HERMES = FORMATS["hermes"]
EVERY = range(10_000)
PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
EACH_WRITER = pytest.mark.parametrize("writer", WRITERS)


def calls_of(message):
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@EACH_WRITER
@settings(deadline=None)
@given(calls=CALLS, cuts=CUTS)
def test_written_calls_come_back(writer, calls, cuts):
    message = in_pieces(WRITERS[writer](calls), cuts, format_of(writer), tool_names=[name for name, _ in calls])
    assert calls_of(message) == calls
    assert [call.id for call in message.tool_calls] == [f"c{i}" for i in range(len(calls))]
    assert (message.content, message.reasoning) == ("", None)
    assert all(call.error is None for call in message.tool_calls)


@pytest.mark.parametrize("writer", THINKS)
@settings(deadline=None)
@given(calls=CALLS, cuts=CUTS, reasoning=PROSE, before=PROSE, after=PROSE)
def test_text_around_calls_is_reasoning_and_content(writer, calls, cuts, reasoning, before, after):
    start, end = THINKS[writer]
    text = f"{start}{reasoning}{end}{before}\n{WRITERS[writer](calls)}\n{after}"
    message = in_pieces(text, cuts, format_of(writer))
    assert calls_of(message) == calls
    assert message.reasoning == (reasoning or None)
    assert message.content == "\n".join(filter(None, [before, after]))


MARKS = sorted({mark for format in FORMATS.values() for mark in format.marks})
JSON_PIECES = (
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {"a": "}"}}', '{"arguments": {}, "name": "g"}',
    '{"name": "f"', ', "arguments": ', '{"a": [', '"x"', "f(a=1)", "f{a:1}", "[", "]", "}", "{", '"', "\\", "\\u12",
    ",", ";", ":", " ", "\n", "text", "1", "-", "null", "True", "'", "<", "é🙂",
    '{"name": "f", "arguments": "{\\"a\\": 2}"}',
)  # fmt: skip
FRAGMENTS = st.sampled_from([*MARKS, *JSON_PIECES, '<|"|>', "<escape>"])
BROKEN = st.lists(FRAGMENTS, max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(text=BROKEN, cuts=CUTS)
@example(text="<tool_call></think></tool_call><tool_call></think>", cuts=set())
def test_any_cutting_of_any_text_gives_the_same_message(name, text, cuts):
    format = FORMATS[name]
    expected = in_pieces(text, (), format)
    assert expected == parse_message(text, format, call_id="c")
    assert in_pieces(text, cuts, format) == expected
    assert in_pieces(text, EVERY, format) == expected


@settings(deadline=None)
@given(text=BROKEN)
def test_an_error_marks_exactly_the_arguments_that_are_no_object(text):
    for call in parse_message(text, HERMES).tool_calls:
        try:
            is_object = isinstance(json.loads(call.arguments), dict)
        except ValueError:
            is_object = False
        assert is_object or call.error is not None
        assert call.name


@settings(deadline=None)
@given(call=st.tuples(NAMES, ARGUMENTS), at=st.integers(0, 300))
@example(call=("f", {"a": "</tool_call>"}), at=40)
def test_a_truncated_call_is_incomplete_or_content(call, at):
    whole = WRITERS["hermes"]([call])
    text = whole[:at]
    message = in_pieces(text, (), HERMES)
    if at > whole.rindex("}"):  # only the closing mark is missing
        assert calls_of(message) == [call]
        return
    if not message.tool_calls:
        assert message.content == text.rstrip("\n") or message.content == text
        assert f'"{call[0]}"' not in text
    else:
        assert message.tool_calls[0].error == "incomplete"
        assert json.dumps(call[1], ensure_ascii=False).startswith(message.tool_calls[0].arguments)


@pytest.mark.parametrize(
    "body", ["not json", '{"name": 1}', '{"name": ""}', "{}", "[]", "", '{"arguments": {}}', '{"name"}', "7"]
)
def test_a_region_without_a_call_is_content_with_its_marks(body):
    text = f"Well: <tool_call>{body}</tool_call> so."
    for cuts in ((), EVERY):
        assert in_pieces(text, cuts, HERMES).content == text


def test_damage_behind_the_name_stays_in_the_arguments():
    message = in_pieces('<tool_call>{"name": "f", "arguments": {"a": ?, "b"}}</tool_call>!', EVERY, HERMES)
    (call,) = message.tool_calls
    assert (call.name, call.arguments, call.error) == ("f", '{"a": ?, "b"}}', "malformed")
    assert message.content == "!"


def test_arguments_stream_while_they_are_read():
    parser = MessageParser(HERMES, call_id="c")
    assert parser.push("<think>a") == [ReasoningDelta("a")]
    assert parser.in_reasoning
    assert parser.push("</think>b") == [ContentDelta("b")]
    assert not parser.in_reasoning
    assert parser.push('<tool_call>{"name": "f"') == [CallStart(0, "c0", "f")]
    assert parser.push(', "arguments": {"x": "ab') == [ArgumentsDelta(0, '{"x": "ab')]
    assert parser.push("c</tool_call>") == [ArgumentsDelta(0, "c</tool_call>")]
    assert parser.push('"}') == [ArgumentsDelta(0, '"}')]
    assert parser.push("}") == [CallEnd(0)]
    assert parser.push("</tool_call>") == parser.finish() == []


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", "so", "yes"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, "so</think>yes"),
        ("<|im_start|>assistant\n", None, "so</think>yes"),
        ("<think>", None, "so</think>yes"),
    ],
)
def test_the_prompt_may_have_opened_the_reasoning(prompt, reasoning, content):
    message = in_pieces("so</think>yes", EVERY, HERMES, prompt=prompt)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_text_of_the_prompt_is_no_part_of_the_message():
    message = in_pieces(" fine.", (), HERMES, prompt="<|im_start|>assistant\nIt is")
    assert message.content == " fine."


@pytest.mark.parametrize(
    "text", ['{"name": "Ann", "parameters": {}}', '{"a": 1} and', '{"name": "f", "age": 3}', "[1, 2]", "[f]"]
)
def test_json_that_calls_no_known_tool_is_content(text):
    assert in_pieces(text, EVERY, FORMATS["llama3"], tool_names=["f"]).content == text


def test_unmarked_calls_are_at_the_beginning():
    text = 'As {"name": "f", "parameters": {}} shows'
    assert in_pieces(text, EVERY, FORMATS["llama3"], tool_names=["f"]).content == text


def test_text_behind_an_unmarked_call_is_content():
    message = in_pieces('{"name": "f", "parameters": {}} Done.', EVERY, FORMATS["llama3"], tool_names=["f"])
    assert (len(message.tool_calls), message.content) == (1, "Done.")


def test_code_behind_the_python_tag_is_content():
    assert in_pieces("<|python_tag|>print(1)", EVERY, FORMATS["llama3"]).content == "<|python_tag|>print(1)"


def test_without_calls_their_marks_are_content():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = in_pieces(f"<think>a</think>{text}", (), HERMES.without_calls())
    assert (message.reasoning, message.content, message.tool_calls) == ("a", text, ())


def test_a_message_is_a_dictionary_for_the_next_prompt():
    message = parse_message(
        '<think>a</think>b<tool_call>{"name": "f", "arguments": {}}</tool_call>', HERMES, call_id="c"
    )
    assert message.as_dict() == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "a",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "{", '{"name": "f", "arguments": {"a":', "<think>", " ", '"', "\\", "1", "[", "f"]
)
def test_the_cost_is_linear_in_the_text(piece):
    """A text of a million characters takes seconds; with a quadratic cost it took hours."""
    start = time.monotonic()
    for head in ("", "<tool_call>", '<tool_call>{"name": "f", "arguments": '):
        parser = MessageParser(HERMES)
        parser.push(head + piece * (300_000 // len(piece)))
        for _ in range(3_000):
            parser.push(piece)
        parser.finish()
    assert time.monotonic() - start < 60


def test_the_example_of_the_page_runs(capsys):
    (example,) = re.findall(r"```python\n(from foreword.messages.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example, {})
    *events, arguments = capsys.readouterr().out.splitlines()
    assert events[0] == "ReasoningDelta(text='Look it up.')"
    assert arguments == '{"city": "Paris"}'


def test_the_page_lists_the_formats():
    table = PAGE.read_text().partition("## Formats")[2].partition("\n\n`chat`")[0]
    names = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert sorted(name for row in names for name in row) == sorted(FORMATS)
