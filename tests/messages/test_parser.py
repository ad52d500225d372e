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
    format_of_template,
    parse_message,
)
from messages.rig import ARGUMENTS, CALLS, CUTS, NAMES, PROSE, THINKS, WRITERS, format_of, in_pieces

HERMES = FORMATS["hermes"]
EVERY = range(10_000)
PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
EACH_WRITER = pytest.mark.parametrize("writer", WRITERS)


def calls_of(message):
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.one_in(9)
@EACH_WRITER
@given(calls=CALLS, cuts=CUTS)
def test_written_calls_come_back(writer, calls, cuts):
    message = in_pieces(WRITERS[writer](calls), cuts, format_of(writer), tool_names=[name for name, _ in calls])
    assert calls_of(message) == calls
    assert [call.id for call in message.tool_calls] == [f"c{i}" for i in range(len(calls))]
    assert (message.content, message.reasoning) == ("", None)
    assert all(call.error is None for call in message.tool_calls)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("writer", THINKS)
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
    '{"name": "f", "arguments": "{\\"a\\": 2}"}', ', "args": ', ', "input": {}', ', "city": 1', "null}", "```",
    "```json\n", '{"name": "f", "arguments": null}',
)  # fmt: skip
FRAGMENTS = st.sampled_from([*MARKS, *JSON_PIECES, '<|"|>', "<escape>"])
BROKEN = st.lists(FRAGMENTS, max_size=12).map("".join)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
@given(text=BROKEN, cuts=CUTS)
@example(text="<tool_call></think></tool_call><tool_call></think>", cuts=set())
def test_any_cutting_of_any_text_gives_the_same_message(name, text, cuts):
    format = FORMATS[name]
    for names in (None, ["f"]):
        expected = in_pieces(text, (), format, tool_names=names)
        assert expected == parse_message(text, format, call_id="c", tool_names=names)
        assert in_pieces(text, cuts, format, tool_names=names) == expected
        assert in_pieces(text, EVERY, format, tool_names=names) == expected


@given(text=BROKEN)
def test_an_error_marks_exactly_the_arguments_that_are_no_object(text):
    for call in parse_message(text, HERMES).tool_calls:
        try:
            is_object = isinstance(json.loads(call.arguments), dict)
        except ValueError:
            is_object = False
        assert is_object or call.error is not None
        assert call.name


@given(call=st.tuples(NAMES, ARGUMENTS), at=st.integers(0, 300))
@example(call=("f", {"a": "</tool_call>"}), at=40)
def test_a_truncated_call_is_incomplete_or_content(call, at):
    whole = WRITERS["hermes"]([call])
    text = whole[:at]
    message = in_pieces(text, (), HERMES)
    if at > whole.rindex("}"):  # only the closing mark is missing
        assert calls_of(message) == [call]
        assert message.content == ""
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


MARKED = [writer for writer in WRITERS if writer not in ("llama3", "pythonic")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("writer", MARKED)
@given(call=st.tuples(NAMES, ARGUMENTS), cuts=CUTS, left=st.integers(0, 30), is_open=st.booleans())
def test_a_cut_mark_behind_a_call_is_no_text(writer, call, cuts, left, is_open):
    """The closing mark of the call, if it has one, or the opening one of the next."""
    text, region = WRITERS[writer]([call]), format_of(writer).calls_region
    mark = (region.open if is_open or region.close is None else region.close).texts[0]
    text = f"{text.removesuffix(mark)}\n{mark[:-1][:left]}"
    message = in_pieces(text, cuts, format_of(writer))
    assert (calls_of(message), message.content, message.tool_calls[0].error) == ([call], "", None)


@pytest.mark.parametrize("writer", THINKS)
@given(reasoning=PROSE, cuts=CUTS, left=st.integers(0, 30))
def test_a_cut_mark_behind_reasoning_is_no_text(writer, reasoning, cuts, left):
    start, end = THINKS[writer]
    message = in_pieces(f"{start}{reasoning}\n{end.strip()[:-1][:left]}", cuts, format_of(writer))
    assert (message.content, (message.reasoning or "").strip()) == ("", reasoning)


KEYS = ("arguments", "parameters", "args", "input")
JSON_FORMS = {
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "smollm2": "<tool_call>[{}]</tool_call>",
    "llama3": "{}",
    "python_tag": "<|python_tag|>{}",
}


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize("key", KEYS)
@settings(deadline=None, max_examples=15)  # for each of sixteen
@given(call=st.tuples(NAMES, ARGUMENTS), cuts=CUTS, is_first=st.booleans(), as_text=st.booleans())
def test_arguments_under_any_usual_key_reach_the_call(form, key, call, cuts, is_first, as_text):
    name, arguments = call
    fields = {"name": name, key: json.dumps(arguments) if as_text else arguments}
    text = json.dumps(dict(sorted(fields.items(), key=lambda field: (field[0] == "name") == is_first)))
    format = FORMATS["llama3" if form == "python_tag" else form]
    message = in_pieces(JSON_FORMS[form].replace("{}", text), cuts, format, tool_names=[name])
    assert calls_of(message) == [call]
    assert (message.tool_calls[0].error, message.content) == (None, "")


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize("written", ["null", '""', '"null"', '" "', "{}"])
def test_no_arguments_are_an_empty_object(form, written):
    format = FORMATS["llama3" if form == "python_tag" else form]
    for text in (f'{{"name": "f", "arguments": {written}}}', f'{{"arguments": {written}, "name": "f"}}'):
        message = in_pieces(JSON_FORMS[form].replace("{}", text), EVERY, format, tool_names=["f"])
        assert calls_of(message) == [("f", {})]
        assert message.tool_calls[0].error is None


@pytest.mark.parametrize("form", ["hermes", "smollm2", "python_tag"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "city": "Paris"}',
        '{"city": "Paris", "name": "f"}',
        '{"name": "f", "arguments": {}, "parameters": {"city": "Paris"}}',
        '{"name": "f", "arguments": ["Paris"]}',
        '{"name": "f", "arguments": "Paris"}',
        '{"name": "f", "kwargs": {"city": "Paris"}}',
        '{"type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}',
    ],
)
def test_what_may_be_arguments_is_never_lost(form, text):
    """Not one call without arguments and without an error, and the text is in the call or in the content."""
    message = in_pieces(
        JSON_FORMS[form].replace("{}", text), EVERY, FORMATS["llama3" if form == "python_tag" else form]
    )
    assert all(call.error == "malformed" for call in message.tool_calls)
    assert "Paris" in message.content + "".join(call.arguments for call in message.tool_calls)


BARE = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("name", ["hermes", "smollm2", "llama3"])
@pytest.mark.parametrize("written", ["{}", "\n{}\n", "```json\n{}\n```", "```\n{}\n```\n", "```json\n{}"])
@pytest.mark.parametrize("key", KEYS)
def test_an_answer_that_is_nothing_but_a_call_is_a_call(name, written, key):
    text = written.replace("{}", BARE.replace("arguments", key))
    for cuts in ((), EVERY):
        message = in_pieces(text, cuts, FORMATS[name], tool_names=["f", "g"])
        assert (calls_of(message), message.content) == ([("f", {"a": 1})], "")


@pytest.mark.parametrize("name", ["hermes", "smollm2"])
def test_a_bare_call_may_follow_reasoning_and_may_be_several(name):
    message = in_pieces(f"<think>\nHm.\n</think>\n\n{BARE}", EVERY, FORMATS[name], tool_names=["f"])
    assert (calls_of(message), message.content, message.reasoning) == ([("f", {"a": 1})], "", "Hm.")
    opened = in_pieces(
        f"Hm.</think>{BARE}", EVERY, FORMATS[name], tool_names=["f"], prompt="<|im_start|>assistant\n<think>"
    )
    assert (calls_of(opened), opened.reasoning) == ([("f", {"a": 1})], "Hm.")
    listed = in_pieces(f"[{BARE}, {BARE}]", EVERY, FORMATS[name], tool_names=["f"])
    assert calls_of(listed) == [("f", {"a": 1})] * 2


@pytest.mark.parametrize("name", ["hermes", "smollm2"])
@pytest.mark.parametrize(
    "text",
    [
        f"{BARE} Done.", f"So {BARE}", BARE.replace('"f"', '"other"'), BARE[:-1], '{"name": "f"}', "{}", "[]",
        "```json", BARE.replace("}}", '}, "note": 1}'), '{"answer": 1}', '```python\nprint(1)\n```',
        f"```\n{BARE}\n``` Done.",
        f"````\n{BARE}", f"{BARE}{BARE}", BARE.replace('{"a": 1}', "1"),
    ],
)  # fmt: skip
def test_any_other_json_is_content(name, text):
    for cuts in ((), EVERY):
        message = in_pieces(text, cuts, FORMATS[name], tool_names=["f"])
        assert (message.tool_calls, message.content) == ((), text)
    assert in_pieces(BARE, (), FORMATS[name]).content == BARE  # no tool is known
    assert in_pieces(BARE, (), FORMATS[name], tool_names=["f"], prompt="<|im_start|>assistant\nSo: ").content == BARE
    assert in_pieces(BARE, (), FORMATS[name].without_calls(), tool_names=["f"]).content == BARE


def test_only_what_may_be_a_bare_call_is_held_back():
    parser = MessageParser(HERMES, tool_names=["f"])
    assert parser.push('{"ans') == []
    assert parser.push('wer": ') == [ContentDelta('{"answer":')]
    parser = MessageParser(HERMES, tool_names=["f"], call_id="c")
    assert parser.push(BARE) == []
    assert parser.finish() == [CallStart(0, "c0", "f"), ArgumentsDelta(0, '{"a": 1}'), CallEnd(0)]


def test_a_mark_behind_json_is_a_mark():
    message = in_pieces(f'{{"a": 1}} <tool_call>{BARE}</tool_call>', EVERY, HERMES, tool_names=["f"])
    assert (calls_of(message), message.content) == ([("f", {"a": 1})], '{"a": 1}')


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
        ("[|assistant|]\n<think>\n", "so", "yes"),
        ("<think>[|assistant|]\n", None, "so</think>yes"),
        ("<think>\n<|im_start|>assistant\n", None, "so</think>yes"),
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


@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "{", '{"name": "f", "arguments": {"a":', "<think>", " ", '"', "\\", "1", "[", "f"]
)
def test_the_cost_is_linear_in_the_text(piece):
    """A text of a million characters takes seconds; with a quadratic cost it took hours."""
    start = time.monotonic()
    for head in ("", "<tool_call>", '<tool_call>{"name": "f", "arguments": ', '{"name": "f", "arguments": {"a": "'):
        parser = MessageParser(HERMES, tool_names=["f"])
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


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "[f(a=1), g()]",
        '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}{"name": "g", "parameters": {}}',
        "<|python_start|>[f(a=1), g()]<|python_end|>",
    ],
)
def test_llama_4_has_calls_with_and_without_marks(text):
    message = in_pieces(text, EVERY, FORMATS["llama4"], tool_names=["f", "g"])
    assert (message.content, calls_of(message)) == ("", [("f", {"a": 1}), ("g", {})])


def test_a_call_of_mistral_may_have_an_id_before_its_arguments():
    text = 'Yes.[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": [1]}[TOOL_CALLS]g[ARGS]{}'
    message = in_pieces(text, EVERY, FORMATS["mistral3"])
    assert (message.content, calls_of(message)) == ("Yes.", [("f", {"a": [1]}), ("g", {})])
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]'
    assert calls_of(in_pieces(listed, EVERY, FORMATS["mistral"])) == [("f", {"a": 1})]


@pytest.mark.parametrize("name", ["mistral3", "mistral"])
@pytest.mark.parametrize(("opening", "closing"), [("[THINK]", "[/THINK]"), ("<think>\n", "\n</think>\n")])
def test_the_reasoning_of_mistral_has_either_marks(name, opening, closing):
    """The first of its models that reasoned wrote the marks that others write."""
    message = in_pieces(f"{opening}Hm.{closing}Yes.{WRITERS[name]([('f', {})])}", EVERY, FORMATS[name])
    assert (message.reasoning, message.content, calls_of(message)) == ("Hm.", "Yes.", [("f", {})])


@pytest.mark.parametrize(
    "name", ["apertus", "deepseek", "deepseek31", "gemma4", "hermes", "kimi_k2", "mistral", "mistral3"]
)
def test_a_call_ends_reasoning_whose_closing_mark_is_left_out(name):
    start, end = FORMATS[name].reasoning_marks
    calls = [("f", {"a": 1}), ("g", {})]
    message = in_pieces(f"{start}Hm, <tool_call>?\n{WRITERS[name](calls)}", EVERY, FORMATS[name])
    assert (message.reasoning.strip(), message.content, calls_of(message)) == ("Hm, <tool_call>?", "", calls)
    message = in_pieces(f"{start}Hm.{end}{WRITERS[name](calls)}", EVERY, FORMATS[name].without_calls())
    assert message.tool_calls == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("phi4", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}'),
        ("phi4", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|><|tool_call|>{"name": "g"}'),
        ("olmo3", "<function_calls>\nf(a=1)\n\ng()\n</function_calls>"),
        ("olmo3", "<function_calls>f(a=1) g()"),
        ("deepseek", '<CALLS>\n<CALL>function<SEP>f\n```json\n{"a": 1}\n```\n<END>\n<CALL>function<SEP>g\n```json\n{}'),
        ("deepseek", '<CALLS><CALL>function<SEP>f\n```json\n{"a": 1}<END><CALL>function<SEP>g```json{}```<END><ENDS>'),
        ("deepseek31", '<CALLS><CALL>f<SEP>{"a": 1}\n<CALL>g<SEP>\n{}<END>'),
        ("kimi_k2", '<|tool_calls_section_begin|> <|tool_call_begin|>f<|tool_call_argument_begin|> {"a": 1}'
                    "<|tool_call_begin|> functions.g:12 <|tool_call_argument_begin|> {} <|tool_call_end|>"),
        ("minimax_m1", '<tool_calls>{"name": "f", "arguments": {"a": 1}} {"name": "g", "arguments": {}}'),
    ],
)  # fmt: skip
def test_what_models_leave_out_between_calls_is_not_needed(name, text):
    marks = {"CALLS": "calls▁begin", "CALL": "call▁begin", "SEP": "sep", "END": "call▁end", "ENDS": "calls▁end"}
    text = re.sub("<([A-Z]+)>", lambda mark: f"<｜tool▁{marks[mark[1]]}｜>", text)
    message = in_pieces(f"Well.\n{text}", EVERY, FORMATS[name])
    assert (message.content, calls_of(message)) == ("Well.", [("f", {"a": 1}), ("g", {})])
    assert all(call.error is None for call in message.tool_calls)


@pytest.mark.parametrize("writer", ["phi4", "nemotron2", "olmo3", "deepseek", "deepseek31", "kimi_k2", "minimax_m1"])
def test_damage_between_calls_loses_no_text(writer):
    region = format_of(writer).calls_region
    opening, closing = region.open.texts[0], region.close.texts[0]
    for text in (f"{opening}Paris{closing}", f"{opening}\nf {closing}!", f"{opening} {{"):
        for cuts in ((), EVERY):
            message = in_pieces(text, cuts, format_of(writer))
            assert (message.tool_calls, message.content) == ((), text)
    call = WRITERS[writer]([("f", {"a": 1})]).removesuffix(closing)
    for cuts in ((), EVERY):
        message = in_pieces(f"{call} Paris?! {{{closing} Well.", cuts, format_of(writer))
        assert calls_of(message) == [("f", {"a": 1})]
        assert "Paris?! {" in message.content
        assert message.content.endswith("Well.")


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("think_mode=True\n</global_setting>{# <global_setting> <tool_call> #}{{ '<response>\n' }}", "ernie45"),
        ("{{- '<|header_start|>assistant<|header_end|>' -}}", "llama4"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("List of tools: [{% endif %}{{ content.split('</think>')[-1] }}{% if tools %}", "lfm2"),
        ("List of tools: {% endif %}{{ '<think>' ~ thinking ~ '<|tool_call_start|>[' }}{% if tools %}", "lfm2"),
        ("List of tools: <tools></tools> Write <tool_call>", "hermes"),
        ("{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}", "mistral3"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        (
            "<|start_of_role|>{{ 'respond only with <|tool_call|> followed by a JSON list' }} <think></think>",
            "granite3",
        ),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4"),
        ("{{- '<TOOLCALL>[' -}}<SPECIAL_11>Assistant", "nemotron2"),
        ("{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}", "olmo3"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] }}<think>{{ '\n' + '```json' }}", "deepseek"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] }}</think>", "deepseek31"),
        ("<|tool_calls_section_begin|>{% for tool_call in message['tool_calls'] %}</think>", "kimi_k2"),
        ("<beginning_of_sentence>{{ 'please respond with <tool_calls></tool_calls> XML tags' }}", "minimax_m1"),
    ],
)
def test_a_template_that_writes_calls_has_its_format(sign, name):
    assert format_of_template(f"{{% if tools %}}{sign}{{% endif %}}<|im_start|>").name == name


def test_the_page_lists_the_formats():
    table = PAGE.read_text().partition("## Formats")[2].partition("\n\n`chat`")[0]
    names = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert sorted(name for row in names for name in row) == sorted(FORMATS)
