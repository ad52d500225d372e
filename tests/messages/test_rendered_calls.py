"""Calls as the chat templates of models write them in a conversation: read back, and allowed by the grammar."""

import json
import re
from pathlib import Path

import pytest

from foreword.messages import FORMATS, parse_message
from foreword.messages.generic import deepseek31_messages, phi4_messages
from foreword.models.chat import ChatTemplate
from foreword.models.chat_messages import with_ids
from messages.render_calls import CALLS, TOOLS, conversation
from messages.rig import in_pieces

CASES = json.loads((Path(__file__).parents[1] / "data" / "rendered_calls.json").read_text())["cases"]
ENDS = re.compile(
    r"<\|im_end\|>|<｜end▁of▁sentence｜>|\[e~\[|<end_of_sentence>|<\|end\|>|<SPECIAL_12>|<｜hy_eos:opensource｜>|<\|eos\|>"
    r"|<\|end_of_text\|>"
)
EVERY = range(2000)
EACH = pytest.mark.parametrize("name", CASES)


def answers_of(name):
    """Each answer of a conversation, with the prompt before it."""
    format = FORMATS[CASES[name]["format"]]
    parts = [(part, format.anchor.last_end(part)) for part in ENDS.split(CASES[name]["text"])]
    return format, [(part[:start], part[start:]) for part, start in parts if start is not None]


@EACH
def test_calls_of_a_conversation_are_read_back(name):
    format, answers = answers_of(name)
    for cuts in ((), EVERY):
        messages = [in_pieces(text, cuts, format, prompt=prompt) for prompt, text in answers]
        calls = [call for message in messages for call in message.tool_calls]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [*CALLS, CALLS[1]]
        assert all(call.error is None for call in calls)
        contents = [message.content.strip() for message in messages if message.content.strip()]
        assert contents == ["Well."] * CASES[name]["text"].count("Well.")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"llama-cpp-Phi-4-mini-instruct", "Apriel-1.5", "Apriel-1.6"}))
def test_the_grammar_allows_what_a_template_writes(name):
    """Phi-4-mini writes its calls as a list, as its vendor says; the template of llama.cpp does not. Those of Apriel
    write ids into earlier calls, and ask for calls without them.
    """
    grammars = pytest.importorskip("messages.test_call_grammar")
    format, answers = answers_of(name)
    (text, *_) = [text.strip() for _, text in answers if "weather" in text]
    calls = text[text.index(format.calls_region.open.texts[0]) :]
    assert grammars.accepts(grammars.call_grammar(format, TOOLS, "auto"), text)
    assert grammars.accepts(grammars.call_grammar(format, TOOLS), calls)


@pytest.mark.parametrize(
    ("name", "prompt", "reasoning", "content"),
    [
        ("deepseek", "<｜User｜>a<｜Assistant｜><think>\n", "so", "yes"),
        ("deepseek", "<｜User｜>a<｜Assistant｜>", None, "so</think>yes"),
        ("deepseek31", "<｜User｜>a<｜Assistant｜></think>", None, "so</think>yes"),
        ("deepseek31", "<｜User｜>a<｜Assistant｜><think>", "so", "yes"),
        ("minimax_m2", "]~b]user\na[e~[\n]~b]ai\n<think>\n", "so", "yes"),
        ("hy3", "<｜hy_User:opensource｜>a<｜hy_Assistant:opensource｜><think:opensource>", "so", "yes"),
    ],
)
def test_reasoning_that_the_prompt_opens(name, prompt, reasoning, content):
    end = FORMATS[name].reasoning_marks[1]
    message = parse_message(f"so{end}yes", FORMATS[name], prompt=prompt)
    assert (message.reasoning, message.content) == (reasoning, content)
    call = '{"name": "f", "arguments": {}}'  # nothing of the answer comes before it
    assert parse_message(f"{reasoning or ''}{end}{call}" if reasoning else call, FORMATS[name], prompt=prompt,
                         tool_names=["f"]).tool_calls  # fmt: skip


@pytest.mark.parametrize("name", ["moonshotai-Kimi-K2-Thinking", "MiniMax-M2"])
def test_a_call_ends_the_reasoning(name):
    format, ((prompt, text), *_) = answers_of(name)
    mark = format.calls_region.open.texts[0]
    call = text[text.index(mark) :]
    for cuts in ((), EVERY):
        message = in_pieces(f"<think>Hm. < {call}", cuts, format, prompt=prompt)
        assert (message.reasoning, message.content, len(message.tool_calls)) == ("Hm. <", "", 2)
        assert in_pieces(f"<think>Hm.{mark[:-1]}", cuts, format).reasoning == "Hm."
        message = in_pieces(f"<think>Hm.{call}", cuts, format.without_calls(), prompt=prompt)
        assert (message.reasoning, message.content) == (f"Hm.{call}".strip(), "")


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("apriel", "<|begin_assistant|>\nHere are my reasoning steps:\n", "Hm.\n[BEGIN FINAL RESPONSE]\nWell.$"),
        (
            "apriel",
            "<|assistant|>\n",
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nWell.$\n[END FINAL RESPONSE]",
        ),
        ("hunyuan", "a<|extra_0|>", "<think>\nHm.\n</think>\n<answer>\nWell.$\n</answer>"),
        ("ernie45", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\n<response>\nWell.$\n</response>\n"),
        ("ernie45", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\n<response>\nWell.\n</response>\n$"),
        ("hunyuan", "a<|extra_0|>", "<think>\nHm.\n</think>\n助手：Well.$"),
        ("minimax_m3", "]~b]ai\n", "<mm:think>Hm.</mm:think>Well.$"),
        (
            "kimi_k3",
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Well.$<|close|>response<|sep|><|close|>message<|sep|>",
        ),
        ("solar_open", "<|begin|>assistant", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Well.$<|end|>"),
    ],
)
def test_marks_around_an_answer_are_no_part_of_it(name, prompt, output):
    for format in (FORMATS[name], FORMATS[name].with_generic_calls()):
        call = CALL if format.is_generic else ""
        for cuts in ((), EVERY):
            message = in_pieces(output.replace("$", call), cuts, format, prompt=prompt)
            assert (message.reasoning, message.content, len(message.tool_calls)) == ("Hm.", "Well.", len(call) > 0)


def test_the_beginning_of_answers_of_hunyuan_is_text_elsewhere():
    text = "He said: 助手：你好"
    assert parse_message(f"<think>Hm.</think>\n助手：{text}", FORMATS["hunyuan"]).content == text


def test_names_of_apertus_calls_are_keys():
    """The text is what its template writes. The results follow in the same answer, so it is not among the cases."""
    city = r'''"Paris \"é🙂\"\n\\o/ it's </tool_call>"'''
    others = '"days": -3, "ratio": 2.5, "on": true, "none": null, "list": [1, "a", {"b": false}]'
    where = '"where": {"at": [], "x y": "5"}'
    calls = f'[{{"weather": {{"city": {city}, {others}, {where}}}}}, {{"stop": {{}}}}]'
    text = f"<|inner_prefix|>Hm.<|tools_prefix|>{calls}<|tools_suffix|>"
    for cuts in ((), EVERY):
        message = in_pieces(text, cuts, FORMATS["apertus"], prompt="<|user_end|><|assistant_start|>")
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
        assert (message.reasoning, message.content) == ("Hm.", "")
        for wrong in ('{"f": {}, "g": {}}', '{"f": 1}', '{"f"}'):
            message = in_pieces(f"<|tools_prefix|>[{wrong}]<|tools_suffix|>", cuts, FORMATS["apertus"])
            assert [call.error for call in message.tool_calls] in (["malformed"], [])
            assert wrong[6:] in message.content + "".join(call.arguments for call in message.tool_calls)


def test_ids_count_the_calls_of_a_conversation():
    messages = with_ids(conversation("Well."), "functions.{name}:{number}")
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert ids == ["functions.weather:0", "functions.stop:1", "functions.stop:2"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ids[:2]


def test_tools_of_phi_are_in_the_message_of_the_system():
    functions = json.dumps([tool["function"] for tool in TOOLS])
    told = phi4_messages(conversation("Well."), TOOLS)
    assert told[0] == {"role": "system", "content": "You are a helpful assistant with some tools.", "tools": functions}
    assert [message["role"] for message in told[1:]] == [
        "user",
        "assistant",
        *["tool_response"] * 2,
        "assistant",
        "user",
    ]
    assert all("tool_calls" not in message for message in told)
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert phi4_messages(own, TOOLS) == [{**own[0], "tools": functions}, own[1]]
    assert phi4_messages(own, []) == own


def test_tools_of_deepseek_are_in_words_with_its_marks():
    messages = conversation("Well.")
    first, *others = deepseek31_messages(messages, TOOLS)
    assert others == messages
    assert first["role"] == "system"
    assert all(json.dumps(tool["function"]) in first["content"] for tool in TOOLS)
    (example,) = re.findall("<｜tool▁calls▁begin｜>.*<｜tool▁calls▁end｜>", first["content"])
    example = example.replace("the name of the tool", "f")
    (call,) = parse_message(example, FORMATS["deepseek31"]).tool_calls
    assert (call.name, call.arguments, call.error) == ("f", '{"the name of a parameter": "its value"}', None)
    assert deepseek31_messages(messages, []) == messages


@pytest.mark.parametrize(
    "shown",
    [
        "'' + call.arguments + '!'",
        "'' + call['arguments'] | tojson + '!'",
        "call.name[1:] + call['arguments'] }}{{ '!'",
        "'' ~ call.arguments | tojson ~ '!'",
    ],
)
def test_a_template_that_adds_arguments_to_text_has_them_as_text(shown):
    source = f"{{% for m in messages %}}{{% for call in m.tool_calls %}}{{{{ {shown} }}}}{{% endfor %}}{{% endfor %}}"
    call = {"name": "f", "arguments": {"a": "é"}}
    text = ChatTemplate(source, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert text == '{"a": "é"}!'


def test_a_template_that_writes_arguments_as_json_has_them_as_an_object():
    """Apertus' template adds the text of calls in contents of another kind."""
    source = (
        "{% for m in messages %}{% if m.blocks %}{{ m.blocks.call.arguments + '}' }}{% endif %}"
        "{% for call in m.tool_calls %}{{ call.function.arguments|tojson }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert ChatTemplate(source, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}]) == '{"a": 1}'
