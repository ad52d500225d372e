"""Conversations: tools go into the prompt, answers come back as messages, and demanded calls are constrained."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword import LLM, SamplingParams
from foreword.engine.chat import REASONING_BUDGET, chat_options, make_chat
from foreword.engine.defaults import DEFAULT_PARAMS
from foreword.engine.outputs import CompletionOutput, Position, RequestOutput, Transcript
from foreword.errors import ConfigError, ForewordError, RequestError
from foreword.messages import FORMATS, ContentDelta, Message, ReasoningDelta, ToolCall, parse_message
from foreword.messages.message import MessageBuilder
from foreword.models.chat_messages import check_messages
from foreword.models.tokenizer import Tokenizer
from foreword.structured import GrammarCompiler
from models import vocabularies

TEMPLATE = (
    "{{ '<tools>' ~ (tools | tojson) ~ '</tools>' if tools }}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}{{ '<think>\n' if thinking }}{# <tool_call> #}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
ASK = [{"role": "user", "content": "hello"}]
ANSWER = '<think>\nhe llo\n</think>\n\nhello<tool_call>\n{"name": "f", "arguments": {"a": "é🙂"}}\n</tool_call>'


def tokenizer_with(template=TEMPLATE, **options):
    return Tokenizer.from_gguf(vocabularies.byte_level(chat_template=template, **options))


TOKENIZER = tokenizer_with()


def chat(options=None, params=None, tokenizer=TOKENIZER):
    return make_chat(tokenizer, ASK, params or DEFAULT_PARAMS, 1000, chat_options(tokenizer, options or {}))


def outputs_of(chat, text):
    """The outputs of a stream that has one token more each time, and the final one alone."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer, transcript, found = TOKENIZER.detokenizer(), Transcript(), []
    start = Position()
    for i, token in enumerate(ids):
        transcript.token_ids.append(token)
        transcript.pieces.append(detokenizer.push([token]))
        is_last = i == len(ids) - 1
        part = CompletionOutput(0, transcript, start, transcript.end, "stop" if is_last else None)
        start = transcript.end
        found.append(RequestOutput("a", chat.text, chat.token_ids, [part], is_last))
    return found, replace(found[-1], outputs=[replace(found[-1].outputs[0], start=Position())])


def test_an_answer_is_a_message():
    asked = chat({"tools": TOOLS})
    parts, whole = outputs_of(asked, ANSWER)
    (completion,) = asked.reader().read(whole).outputs
    (call,) = completion.message.tool_calls
    assert completion.message == Message("hello", "he llo", (ToolCall(call.id, "f", '{"a": "é🙂"}'),))
    assert completion.text == ANSWER
    assert len(parts) > 20


@given(skipped=st.sets(st.integers(0, 200)))
def test_events_of_a_stream_add_up_to_the_message(skipped):
    """They do so for a consumer that misses outputs, too."""
    asked, builder, missed = chat({"tools": TOOLS}), MessageBuilder(), None
    reader, (parts, whole) = asked.reader(), outputs_of(asked, ANSWER)
    for i, part in enumerate(parts):
        merged = part.following(missed)
        if i in skipped and not part.finished:
            missed = merged
            continue
        missed = None
        (completion,) = reader.read(merged).outputs
        builder.add(completion.events)
        assert (completion.message is not None) == part.finished
    assert builder.message == completion.message
    expected = asked.reader().read(whole).outputs[0].message
    assert [replace(c, id="") for c in builder.message.tool_calls] == [replace(c, id="") for c in expected.tool_calls]
    assert (builder.message.content, builder.message.reasoning) == (expected.content, expected.reasoning)


@pytest.mark.parametrize(
    ("thinking", "text"), [(False, "<think>hello</think>ab"), (True, "hello</think>ab"), (True, "ab")]
)
def test_reasoning_tokens_are_counted_to_the_end_of_the_reasoning(thinking, text):
    asked = chat({"thinking": thinking})
    parts, whole = outputs_of(asked, text)
    output = asked.reader().read(whole)
    reasoning = text[: text.find("</think>") + len("</think>")] if "</think>" in text else text
    expected = len(TOKENIZER.encode(reasoning, add_special_tokens=False))
    assert output.usage.reasoning_tokens == expected
    assert output.outputs[0].message.reasoning is not None
    reader = asked.reader()
    for part in parts:
        (completion,) = (streamed := reader.read(part)).outputs
        is_begun = thinking or completion.text.startswith("<think>")
        assert streamed.usage.reasoning_tokens == (min(completion.num_tokens, expected) if is_begun else None)


def test_an_answer_without_reasoning_has_no_count_of_it():
    asked = chat()
    output = asked.reader().read(outputs_of(asked, "hello")[1])
    assert (output.usage.reasoning_tokens, output.outputs[0].message) == (None, Message("hello"))
    assert output.outputs[0].events == (ContentDelta("hello"),)


def test_tools_are_in_the_prompt():
    assert chat({"tools": TOOLS}).text.startswith('<tools>[{"type": "function"')
    assert chat({"tools": []}).text == chat().text == "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"
    assert chat({"add_generation_prompt": False}).text.endswith("<|im_end|>")
    assert chat({"template": {"thinking": True}}).text == chat({"thinking": True}).text


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_are_content_unless_there_are_tools(options):
    asked = chat(options)
    message = asked.reader().read(outputs_of(asked, ANSWER)[1]).outputs[0].message
    assert message.tool_calls == ()
    assert "<tool_call>" in message.content
    assert message.reasoning == "he llo"


def test_a_demanded_call_is_a_grammar():
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        grammar = chat({"tools": TOOLS, "tool_choice": choice}).params.structured_outputs.text
        assert "start:" in grammar
        assert '\\"name\\": \\"f\\"' in grammar
    alone = chat({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert "*" not in alone.params.structured_outputs.text.splitlines()[0]


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}
ODD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


def described(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def refusal_of(asked):
    compiler = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[1])
    with pytest.raises(RequestError) as caught:
        compiler.grammar("a", asked.params)
    return caught.value


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", ["hermes", "smollm2", "llama3"])
def test_of_many_tools_the_odd_one_is_named(format):
    pytest.importorskip("llguidance")
    tools = [*TOOLS, described("odd", ODD), described("good", {"type": "object"})]
    error = refusal_of(chat({"tools": tools, "tool_choice": "required", "message_format": format}))
    assert (error.field, error.value) == ("tools[1].function.parameters.properties.a", ODD["properties"]["a"])
    assert "%json" not in str(error)
    bare = [tool["function"] for tool in tools]
    assert refusal_of(chat({"tools": bare, "tool_choice": "required"})).field == "tools[1].parameters.properties.a"
    tools[1]["function"]["strict"] = True
    assert refusal_of(chat({"tools": tools})).field == "tools[1].function.parameters.properties.a"


@pytest.mark.parametrize(
    ("options", "origin"),
    [
        ({}, None),
        ({"tools": TOOLS, "message_format": "llama3"}, None),  # its calls are without marks
        ({"tools": TOOLS}, "tools"),
        ({"tools": [described("f", ODD, strict=False)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"tools": TOOLS, "parallel_tool_calls": False, "message_format": "plain"}, None),  # it has no calls
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [*TOOLS, described("g", {}, strict=True)]}, "tools[1].function.strict"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}},
            },
            "tool_choice",
        ),
    ],
)
def test_a_grammar_follows_what_was_asked_of_calls(options, origin):
    asked = chat(options)
    structured = asked.params.structured_outputs
    assert (structured is None) == (origin is None)
    if structured is not None:
        assert structured.origin.field == origin
        # A call without marks would not follow what was asked for.
        assert (asked.format.bare is None) == (origin != "tools")
        assert asked.params.thinking_budget is None
        template = {"start_anchor": "A:", "fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json",
                    "transform": {"function": {"name": "{content.a.b}", "arguments": "{content.c}"}}}}}  # fmt: skip
        own = tokenizer_with()
        own.response_template = template
        if origin == "tools":
            assert chat(options, tokenizer=own).params.structured_outputs is None
            return
        with pytest.raises(RequestError, match="no grammar can be made") as caught:
            chat(options, tokenizer=own)
        assert caught.value.field == origin


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("temperature", "temperature"), ("response_format", "structured_outputs"), ("guided_json", "structured_outputs")],
)
def test_a_parameter_of_a_request_is_no_variable_of_a_template(name, parameter):
    with pytest.raises(
        RequestError, match=rf"{name} = 1: is not an option of a chat. Pass SamplingParams\({parameter}=…"
    ):
        chat({name: 1})


@pytest.mark.parametrize(
    ("options", "field", "fix"),
    [
        ({"message_formt": "hermes"}, "message_formt", "Did you mean 'message_format'?"),
        ({"continue_final_message": True}, "continue_final_message", "Leave it out."),
        ({"messages": [], "template": {}}, "messages", ""),
        ({"template": {"messages": []}}, "template.messages", "Leave it out."),
        ({"template": 5}, "template", ""),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
        ({"add_generation_prompt": 0}, "add_generation_prompt", ""),
    ],
)
def test_an_option_that_nothing_reads_is_refused(options, field, fix):
    with pytest.raises(RequestError) as caught:
        chat(options)
    assert caught.value.field == field
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("value", [np.zeros((2, 2)), object(), b"x", range(3), {1}, (1, 2), 1.5], ids=type)
@pytest.mark.parametrize("name", ["tool_choice", "reasoning_effort", "message_format", "thinking", "mood"])
def test_a_value_of_any_other_type_is_refused_by_the_name_of_its_option(name, value):
    with pytest.raises(ForewordError, match=name):
        chat({name: value})


NOT_JSON = [np.zeros(2), np.int64(3), object(), b"x", range(3), {1}, {1: 2}]


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_a_value_that_json_does_not_have_is_refused_by_its_path_wherever_it_is(value):
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": [value]}}}
    tool = {"type": "function", "function": function}
    for options, path in (
        ({"tools": [tool]}, "tools[0].function.parameters.properties.a[0]"),
        ({"tool_choice": {"type": value}}, "tool_choice.type"),
        ({"template": {"mood": value}}, "template.mood"),
    ):
        with pytest.raises(RequestError) as caught:
            chat(options)
        assert caught.value.field == path
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": value}}}
    with pytest.raises(RequestError) as caught:
        check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.field == "messages[0].tool_calls[0].function.arguments.x"


def test_a_list_in_itself_is_refused():
    endless = [[]]
    endless.append(endless)
    with pytest.raises(RequestError, match="nests more than"):
        chat({"template": {"mood": endless}})


def test_variables_of_the_template_are_options():
    asking = tokenizer_with(TEMPLATE + "{% if mood is defined %}{{ mood }}{% endif %}")
    assert chat({"mood": "calm"}, tokenizer=asking).text == chat(tokenizer=asking).text + "calm"
    assert chat({"template": {"mood": "calm"}}, tokenizer=asking).text == chat(tokenizer=asking).text + "calm"
    assert chat({"mood": None, "tool_choice": None}).text == chat().text


def test_strict_is_not_shown_to_the_model():
    assert "strict" not in chat({"tools": [described("f", {}, strict=True)]}).text


def test_a_bare_call_of_a_given_tool_is_a_call():
    bare = '{"name": "f", "arguments": {"a": 1}}'
    for options, num_calls in (({"tools": TOOLS}, 1), ({"tools": TOOLS, "tool_choice": "none"}, 0), ({}, 0)):
        asked = chat(options)
        message = asked.reader().read(outputs_of(asked, bare)[1]).outputs[0].message
        assert len(message.tool_calls) == num_calls
        assert message.content == ("" if num_calls else bare)


def test_reasoning_before_a_demanded_call_has_a_budget():
    demanded = {"tools": TOOLS, "tool_choice": "required"}

    def marks(**options):
        params = chat({**demanded, **options.pop("options", {})}, **options).params
        return params.thinking_start, params.thinking_end, params.thinking_budget

    assert marks() == (None, None, None)  # "<think>" is not a token: the call comes first
    assert marks(options={"thinking": True}) == (None, "</think>", REASONING_BUDGET)
    marked = tokenizer_with(user=("<think>",))
    (start,) = marked.encode("<think>", add_special_tokens=False)
    assert marks(tokenizer=marked) == (start, "</think>", REASONING_BUDGET)
    assert marks(tokenizer=marked, params=SamplingParams(thinking_budget=7)) == (start, "</think>", 7)
    assert marks(tokenizer=marked, params=SamplingParams(thinking_end="so")) == (None, "so", None)


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


@pytest.mark.parametrize(
    ("options", "params", "may_end"),
    [
        ({"tools": TOOLS}, None, True),
        ({"tools": TOOLS, "tool_choice": "required"}, None, False),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, None, False),
        ({"tools": TOOLS, "parallel_tool_calls": False}, None, False),
        ({"tools": STRICT}, None, False),
        ({"tools": TOOLS}, SamplingParams(structured_outputs={"choice": ["a"]}), False),
    ],
)
def test_a_call_ends_reasoning_unless_a_structure_has_to_follow_it(options, params, may_end):
    """Otherwise the call in the reasoning would not follow what was asked for, and the one after it would be a second.

    If it ends the reasoning, the output may end behind it, without the mark that closes the reasoning.
    """
    asked = chat({**options, "thinking": True}, params)
    text = 'Hm.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = asked.reader().read(outputs_of(asked, text)[1]).outputs[0].message
    assert (message.reasoning, len(message.tool_calls)) == (("Hm.", 1) if may_end else (text, 0))
    compiler = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[1])
    assert compiler.grammar("a", asked.params).accept([1]) == may_end


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({"tool_choice": "required"}, {}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, {}, "none of the choices"),
        ({"tools": TOOLS, "tool_choice": "required"}, {"structured_outputs": {"json_object": True}}, "two grammars"),
        ({"tools": [{}]}, {}, "no function with a name"),
    ],
)
def test_a_wrong_choice_is_refused(options, params, message):
    with pytest.raises(RequestError, match=message):
        chat(options, SamplingParams(**params))


def test_a_template_without_a_place_for_tools_shows_them_in_words():
    plain = tokenizer_with("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    asked = chat({"tools": TOOLS}, tokenizer=plain)
    assert asked.format.is_generic
    assert asked.text.startswith("[system] ")
    assert json.dumps(TOOLS[0]["function"]) in asked.text
    for answer in (ANSWER, '{"name": "f", "arguments": {"a": 1}}', '[{"name": "f", "parameters": {}}]'):
        message = asked.reader().read(outputs_of(asked, answer)[1]).outputs[0].message
        assert [(call.name, call.error) for call in message.tool_calls] == [("f", None)]
    demanded = chat({"tools": TOOLS, "tool_choice": "required"}, tokenizer=plain).params.structured_outputs
    assert demanded.origin.field == "tool_choice"
    assert chat({"tools": TOOLS, "tool_choice": "none"}, tokenizer=plain).params.structured_outputs is None


def test_tools_are_in_words_where_the_notation_of_calls_is_not_known():
    unknown = tokenizer_with("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    text = chat({"tools": TOOLS}, tokenizer=unknown).text
    assert "<tool_call>" in text
    assert not text.startswith("[{")
    assert "<tool_call>" not in chat({}, tokenizer=unknown).text


def test_calls_and_results_go_back_in_words():
    plain = tokenizer_with("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    text = make_chat(plain, messages, DEFAULT_PARAMS, 1000, chat_options(plain, {})).text
    assert text == (
        '[user] hello\n[assistant] <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '[user] <tool_response>\n{"name": "f", "content": "2"}\n</tool_response>\n'
    )


def test_a_template_may_take_the_tools_from_the_message_of_the_system():
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{{ '<|tool|>' + m.tools + '<|/tool|>' if m.tools }}{% endfor %}{{ '<|assistant|>' }}"
    )
    asked = chat({"tools": TOOLS}, tokenizer=tokenizer_with(template))
    assert asked.format.name == "phi4"
    described = json.dumps([TOOLS[0]["function"]])
    start = f"<|system|>You are a helpful assistant with some tools.<|tool|>{described}<|/tool|>"
    assert asked.text == f"{start}<|user|>hello<|assistant|>"
    answer = '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>'
    message = asked.reader().read(outputs_of(asked, answer)[1]).outputs[0].message
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": 1}')]


def test_a_template_that_names_tools_but_does_not_read_them_has_them_in_words():
    silent = "%s{# tools #}{%% for m in messages %%}{{ m.content }}{%% endfor %%}"
    for mark, name, call in (
        ("{# <tool_call> #}", "hermes", "<tool_call>\n{"),
        ("{# <｜tool▁calls▁begin｜> ```json #}", "deepseek", "<tool_call>\n{"),
        ("{# <｜tool▁calls▁begin｜> #}", "deepseek31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the name"),
    ):
        asked = chat({"tools": TOOLS}, tokenizer=tokenizer_with(silent % mark))
        assert (asked.format.name, asked.format.is_generic) == (name, name != "deepseek31")
        assert json.dumps(TOOLS[0]["function"]) in asked.text
        assert call in asked.text


@pytest.mark.parametrize(
    ("call", "name", "is_own"),
    [
        ('<tool_call>{"name": "$N", "arguments": $A}</tool_call>', "hermes", True),
        ('<tool_call>[{"name": "$N", "arguments": $A}]</tool_call>', "smollm2", True),
        (']~<tool_call>]~<invoke name="$N">]~<a>{{ f.arguments.a }}]~</a>]~</invoke>]~</tool_call>', "hermes", False),
        ('{# <tool_call> #}<tool_calls>[{"name": "$N", "arguments": $A}]</tool_calls>', "hermes", False),
        ("{# <|start_header_id|> #}<function=$N>$A</function>", "llama3", False),
        ('<tool_call>{"name": "$N", "arguments": {"a": {{ "[" * 9000 + "]" * 9000 }} } }</tool_call>', "hermes", False),
        (
            "{# List of tools: #}<|tool_call_start|>[$N(a='{{ f.arguments.a }}')]<|tool_call_end|><|im_start|>",
            "lfm2",
            True,
        ),
        ("{# <|start_header_id|> #}{{ raise_exception('$N') }}", "llama3", True),
    ],
)
def test_tools_are_in_words_where_a_template_writes_calls_in_another_notation_than_its_marks_say(call, name, is_own):
    call = call.replace("$N", "{{ f.name }}").replace("$A", "{{ f.arguments | tojson }}")
    shown = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{{% endfor %}}"
    template = f"{{{{ tools | tojson if tools }}}}{{% for m in messages %}}{{{{ m.content }}}}{shown}{{% endfor %}}"
    asked = chat({"tools": TOOLS}, tokenizer=tokenizer_with(template))
    assert (asked.format.name, asked.format.is_generic) == (name, not is_own)
    assert (json.dumps(TOOLS[0]) in asked.text) == is_own
    assert not chat({"tools": TOOLS, "message_format": name}, tokenizer=tokenizer_with(template)).format.is_generic


@pytest.mark.parametrize(
    ("sign", "written"),
    [
        ("<tool_call>", "<tool_call>\n{$A}\n</tool_call>\n<tool_call>\n{$B}\n</tool_call>"),
        ("<tool_call>[", "<tool_call>[{$A}, {$B}]</tool_call>"),
        ("List of tools: <|im_start|>", "<|tool_call_start|>[f(a='é'), f()]<|tool_call_end|>"),
    ],
)
def test_calls_are_in_the_content_where_a_template_does_not_show_them(sign, written):
    """They are as the model wrote them, and a later answer is read in the same notation."""
    template = (
        f"{{{{ tools | tojson if tools }}}}{{% for m in messages %}}[{{{{ m.content }}}}]{{% endfor %}}{{# {sign} #}}"
    )
    tokenizer, calls = tokenizer_with(template), [{"name": "f", "arguments": a} for a in ('{"a": "é"}', "")]
    messages = [*ASK, {"role": "assistant", "content": "Well.", "tool_calls": calls}]
    asked = make_chat(tokenizer, messages, DEFAULT_PARAMS, 1000, chat_options(tokenizer, {"tools": TOOLS}))
    text = written.replace("$A", '"name": "f", "arguments": {"a": "é"}').replace("$B", '"name": "f", "arguments": {}')
    assert asked.text.removeprefix(json.dumps(TOOLS)) in (f"[hello][Well.{text}]", f"[hello][Well.\n{text}]")
    assert not asked.format.is_generic
    read = parse_message(f"Well.{text}", asked.format).tool_calls
    assert [(call.name, json.loads(call.arguments)) for call in read] == [("f", {"a": "é"}), ("f", {})]


@pytest.mark.parametrize("sign", ["<tool_call> <function=", "<|tools_prefix|>", "<|tool_call>", "<think>"])
def test_calls_that_neither_the_template_nor_the_content_can_show_are_refused(sign):
    """The template has the words that those have that show calls."""
    shown = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# tool_calls "
    tokenizer = tokenizer_with(f"{shown}{sign} #}}")
    messages = [*ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls = .*Write them into the content"):
        make_chat(tokenizer, messages, DEFAULT_PARAMS, 1000, chat_options(tokenizer, {}))


@pytest.mark.parametrize("content", ["", None])
def test_a_template_that_shows_calls_only_without_content_has_none_where_it_is_empty(content):
    tokenizer = tokenizer_with(
        "{{ tools }}{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "shown", "arguments": "{}"}}
    messages = [*ASK, {"role": "assistant", "content": content, "tool_calls": [call]}]
    asked = make_chat(tokenizer, messages, DEFAULT_PARAMS, 1000, chat_options(tokenizer, {}))
    assert asked.text == "Nonehelloshown"


def test_a_template_that_refuses_the_system_has_the_tools_in_the_users_message():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    text = chat({"tools": TOOLS}, tokenizer=tokenizer_with(template)).text
    assert text.startswith("[user] You can call tools.")
    assert text.endswith("hello\n")


def test_a_named_format_shows_tools_only_where_the_template_does():
    plain = tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert chat({"tools": TOOLS, "message_format": "smollm2"}, tokenizer=plain).text == "hello"
    assert "<tool_call>" in chat({"tools": TOOLS, "message_format": "generic"}, tokenizer=plain).text
    assert chat({"tools": TOOLS, "message_format": "smollm2"}, tokenizer=plain).format.name == "smollm2"
    with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
        chat({"message_format": "smolm2"})


def test_the_format_is_that_of_the_model_or_the_one_given():
    template = {"start_anchor": "A:", "fields": {"content": {}}}
    own = tokenizer_with()
    own.response_template = template
    assert chat(tokenizer=own).format.name == "response_template"
    assert chat({"message_format": FORMATS["llama3"]}, tokenizer=own).format.name == "llama3"
    assert chat().format.name == "hermes"


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("<|tool_call>call:", "gemma4"),
        ("<start_function_call>", "functiongemma"),
        ("<|start_header_id|>", "llama3"),
        ("<tool_call>[{", "smollm2"),
        ("<tool_call>\n{", "hermes"),
        ("<think>", "think"),
        ("", "plain"),
    ],
)
def test_a_chat_template_shows_its_format(sign, name):
    assert chat(tokenizer=tokenizer_with("{{ messages[0].content }}" + sign)).format.name == name


def test_marks_that_are_special_tokens_stay_in_the_text():
    special = tokenizer_with(control=("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"))
    assert chat({"tools": TOOLS}, tokenizer=special).params.skip_special_tokens is False
    assert chat(tokenizer=special).params.skip_special_tokens is True
    assert chat({"tools": TOOLS}).params.skip_special_tokens is True


def test_images_of_a_text_model_are_refused_by_their_field():
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    with pytest.raises(RequestError, match="only text is supported") as found:
        make_chat(TOKENIZER, [message], DEFAULT_PARAMS, 50, chat_options(TOKENIZER, {}))
    assert found.value.field == "messages[0].content[0]"


def test_a_long_conversation_is_truncated_only_on_request():
    with pytest.raises(RequestError, match="at least"):
        make_chat(TOKENIZER, ASK * 100, DEFAULT_PARAMS, 50, chat_options(TOKENIZER, {}))
    assert (
        len(
            make_chat(
                TOKENIZER, ASK * 100, SamplingParams(truncate_prompt_tokens=5), 50, chat_options(TOKENIZER, {})
            ).token_ids
        )
        > 50
    )


@pytest.mark.model
def test_a_real_model_answers_with_a_message(smollm2_path):
    with LLM(str(smollm2_path), max_model_len=128) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (output,) = llm.chat(ASK, params)
        assert output.outputs[0].message == Message(output.outputs[0].text)
        *_, last = parts = list(llm.chat_stream(ASK, params))
        events = [event for part in parts for event in part.outputs[0].events]
        assert "".join(event.text for event in events) == output.outputs[0].text
        assert last.outputs[0].message == output.outputs[0].message
        assert not any(isinstance(event, ReasoningDelta) for event in events)
        assert json.dumps(last.outputs[0].message.as_dict())
        assert parse_message(last.outputs[0].text, FORMATS["plain"]) == last.outputs[0].message


def test_an_executor_without_grammars_answers_with_tools_all_the_same():
    asked = make_chat(
        TOKENIZER, ASK, DEFAULT_PARAMS, 1000, chat_options(TOKENIZER, {"tools": TOOLS}), follows_grammars=False
    )
    assert asked.params.structured_outputs is None
