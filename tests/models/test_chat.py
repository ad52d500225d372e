"""Chat templates: rendering, refusals, and the limits of the sandbox."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import ModelError, RequestError
from foreword.models.chat import ChatTemplate
from foreword.models.chat_messages import MAX_VALUES

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer", "function"])
def test_roles_of_every_interface_are_known_to_every_template(role):
    shown = "system" if role == "developer" else role
    assert render("{{ messages[0].role }}", [{"role": role, "content": "x"}]) == shown


def test_the_developer_is_the_system_unless_the_template_tells_them_apart():
    source = "{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}"
    assert render(source, [{"role": "developer", "content": "x"}]) == "developer"


@pytest.mark.parametrize(
    ("role", "fix"),
    [
        ("usr", "Did you mean 'user'?"), ("assistent", "Did you mean 'assistant'?"), ("User", "Did you mean 'user'?"),
        ("narrator", "Give system or user or assistant"),
    ],
)  # fmt: skip
def test_a_role_that_the_template_does_not_name_is_refused(role, fix):
    messages = [*HI, {"role": role, "content": "x"}]
    with pytest.raises(RequestError, match=r"^messages\[1\]\.role = ") as caught:
        render(CHATML, messages)
    assert fix in caught.value.fix
    named = CHATML + "{% if messages[0].role == '" + role + "' %}{% endif %}"
    assert f"<|im_start|>{role}" in render(named, messages)


def render(source, messages=HI, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_messages_are_rendered_in_order():
    text = render(CHATML, [{"role": "system", "content": "Be brief."}, *HI])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_generation_prompt_the_text_ends_with_the_last_turn():
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_tools_and_extra_variables_are_available_in_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = render("{{ bos_token }}{{ tools[0].function.name }}{{ enable_thinking }}", tools=tools, enable_thinking=True)
    assert text == "<s>fTrue"


def test_an_empty_list_of_tools_is_none():
    assert render("{{ tools is none }}") == render("{{ tools is none }}", tools=[]) == "True"


def test_an_extra_variable_cannot_replace_the_messages():
    with pytest.raises(TypeError):
        ChatTemplate("", {}).render(HI, messages=[])


def test_block_tags_leave_no_lines_or_indentation():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_break_leaves_a_loop():
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"


def test_generation_tags_render_only_their_content():
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_tojson_does_not_escape_for_html():
    value = {"a": "<é>'&", "b": [1, None]}
    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)


def test_strftime_now_is_available():
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_call_arguments_given_as_json_are_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert render(source, messages) == '{"city": "Köln"}'
    assert call["function"]["arguments"] == '{"city": "Köln"}'  # the input is not modified


def test_a_call_without_the_function_wrapper_is_accepted():
    messages = [*HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]
    assert render("{{ messages[1].tool_calls[0].arguments.x }}", messages) == "1"


SHOWN = "{% for m in messages %}{{ m | tojson }};{% endfor %}"
EMPTY = ["", " ", "\n", None, "null", " null ", {}, "{}"]
DAMAGED = ['{"city": "Pa', "{", "[1]", "5", '"x"', "[" * 10**5, "{'a': 1}", '{"a": 1}}', "nul"]


@pytest.mark.parametrize("arguments", EMPTY)
def test_a_call_without_arguments_has_none(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for one in (call, call["function"], {"function": {"name": "f"}}):
        message = {"role": "assistant", "content": None, "tool_calls": [one]}
        shown = "{% set call = messages[1].tool_calls[0] %}{{ (call.function or call).arguments | tojson }}"
        assert render(shown, [*HI, message]) == "{}"


@pytest.mark.parametrize("arguments", [*DAMAGED, {"INVALID_JSON": '{"city": "Pa'}])
def test_arguments_that_are_no_object_reach_the_template(arguments):
    """As text where the template knows text, else in an object, which every template can write."""
    text = arguments if isinstance(arguments, str) else arguments["INVALID_JSON"]
    messages = calls([{"function": {"name": "f", "arguments": arguments}}])
    told = "{% set a = messages[1].tool_calls[0].function %}{{ a.arguments if a.arguments is string else 'no text' }}"
    assert render(told, messages) == text
    items = "{% for k, v in messages[1].tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    assert render(items, messages) == f"INVALID_JSON={text}"


def test_fields_that_are_null_are_absent():
    plain = {"role": "assistant", "content": "b"}
    nothing = dict.fromkeys(("tool_calls", "function_call", "refusal", "audio", "annotations", "name", "reasoning"))
    for message in ({**plain, **nothing}, {**plain, "tool_calls": []}, plain):
        assert render(SHOWN, [*HI, message]) == render(SHOWN, [*HI, plain])
        assert render("{{ 'tool_calls' in messages[1] }}", [*HI, message]) == "False"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    nulls = {**call, "id": None, "index": None, "function": {**call["function"], "strict": None}}
    assert render(SHOWN, calls([nulls])) == render(SHOWN, calls([call]))
    part = {"type": "text", "text": "hi", "annotations": None, "image_url": None, "cache_control": {"type": "x"}}
    assert render(SHOWN, [{"role": "user", "content": [part], "name": None}]) == render(SHOWN, HI)


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": None, "tool_calls": []}, {"content": []}])
def test_what_a_model_or_a_tool_made_may_be_nothing(role, content):
    assert render("{{ messages[1].content | tojson }}", [*HI, {"role": role, **content}]) == '""'


def test_types_are_the_schemas_of_tools():
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...))
    bare = {"name": "f", "parameters": city}
    for tool in ({"type": "function", "function": bare}, bare):
        text = render("{{ (tools[0].function or tools[0]).parameters.properties.name.type }}", tools=[tool])
        assert text == "string"
    with pytest.raises(RequestError, match="has no JSON schema") as caught:
        render("", tools=[{**bare, "parameters": type("Plain", (), {})}])
    assert caught.value.field == "tools[0].parameters"


def user(content):
    return [{"role": "user", "content": content}]


def calls(calls):
    return [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        (None, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1].role"),
        ([*HI, *HI, {"role": 5, "content": "x"}], "messages[2].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user<|im_end|>", "content": "x"}], "messages[0].role"),
        ([{"role": "user\n", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (user(None), "messages[0].content"),
        (user(5), "messages[0].content"),
        (user(b"x"), "messages[0].content"),
        (user(["x"]), "messages[0].content[0]"),
        (user([{"type": "text", "text": "x"}, {"type": "image_url"}]), "messages[0].content[1]"),
        (user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
        (calls("f"), "messages[1].tool_calls"),
        (calls(["f"]), "messages[1].tool_calls[0]"),
        (calls([{"function": "f"}]), "messages[1].tool_calls[0]"),
        (calls([{"function": {}}]), "messages[1].tool_calls[0].function.name"),
        (calls([{"name": 5}]), "messages[1].tool_calls[0].name"),
        (calls([{"function": {"name": "f", "arguments": 5}}]), "messages[1].tool_calls[0].function.arguments"),
        (calls([{"function": {"name": "f", "arguments": ["a"]}}]), "messages[1].tool_calls[0].function.arguments"),
        (calls([{"function": {"name": "f", "parameters": {"a": 1}}}]), "messages[1].tool_calls[0].function.parameters"),
        (calls([{"name": "f", "input": {"a": 1}}]), "messages[1].tool_calls[0].input"),
        ([*HI, {"role": "assistant", "function_call": {"name": "f"}}], "messages[1].function_call"),
        ([*HI, {"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[1].audio"),
        ([{"role": "user", "content": "x", "images": ["eA=="]}], "messages[0].images"),
        ([*HI, {**calls([{"name": "f"}])[1], "content": "x"}], "messages[1].tool_calls"),
        (user([{"type": "text", "text": "x", "txt": "y"}]), "messages[0].content[0].txt"),
        (user([{"type": "text", "text": None}]), "messages[0].content[0].text"),
    ],
)
def test_a_wrong_message_is_named(messages, field):
    with pytest.raises(RequestError) as caught:
        render(CHATML, messages)
    assert caught.value.field == field


NAMES = st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "text"])
SCALARS = st.none() | st.integers() | st.sampled_from(["user", "assistant", "text", "function", "{}", "[1]", "\ud800"])
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4))


@given(messages=ANYTHING | st.lists(st.dictionaries(NAMES, ANYTHING), min_size=1), tools=ANYTHING)
def test_any_input_gives_a_prompt_or_a_request_error(messages, tools):
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role + (m.content or '') }}{{ m.tool_calls }}{% endfor %}"
    try:
        outcome = render(source, messages, tools=tools)
    except RequestError as error:
        outcome = error.field
    assert isinstance(outcome, str)


@pytest.mark.parametrize(("tools", "field"), [("f", "tools"), (5, "tools"), ([{}, "f"], "tools[1]")])
def test_a_wrong_tool_is_named(tools, field):
    with pytest.raises(RequestError) as caught:
        render(CHATML, tools=tools)
    assert caught.value.field == field


def test_a_refusal_by_the_template_is_a_request_error():
    with pytest.raises(RequestError, match="refuses them: roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ nothing.at.all }}",
        "{{ 'a' + 5 }}",
        "{{ 1 // 0 }}",
        "{{ [range] | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'secret' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_failing_template_is_a_request_error(source):
    with pytest.raises(RequestError, match="fails on them"):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages", "{% nonsense %}", "{{ x | nosuchfilter }}"])
def test_an_invalid_template_is_a_model_error(source):
    with pytest.raises(ModelError, match=r"chat template is invalid.*Give the prompt as text"):
        ChatTemplate(source, {})


REACH = [
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__.__base__.__subclasses__()",
    "raise_exception.__globals__",
    "strftime_now.__globals__['json']",
    "cycler.__init__.__globals__.os.system('true')",
    "self._TemplateReference__context.environment",
    "namespace.__init__.__globals__",
    "'{0.__class__.__mro__}'.format(messages)",
    "('{0.__class__.__mro__}' | format(messages))",
    "'{x.__class__.__mro__}'.format_map({'x': messages})",
    "(messages | map(attribute='__class__') | list)[0].__mro__",
    "(messages | attr('__class__')).__mro__",
    "lipsum.__globals__['os'].popen('id').read()",
    "(''['__class__'])['__mro__']",
    "tojson.__globals__",
    "(tools or render).__code__",
]


@pytest.mark.parametrize("source", REACH)
def test_the_sandbox_hides_python_objects(source):
    try:
        text = render("{{ " + source + " }}")
    except RequestError:
        return
    assert not any(word in text for word in ("class", "module", "object", "function")), text


@pytest.mark.parametrize("source", ["messages.append(1)", "messages[0].update(role='x')", "messages.clear()"])
def test_a_template_cannot_modify_the_messages(source):
    with pytest.raises(RequestError, match="SecurityError"):
        render("{{ " + source + " }}")


# --- bounded work -------------------------------------------------------------------------------------------------

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ 'x' * 1000 }}{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 10 ** 4 }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'x' * 10 ** 4 }}{% endfor %}{% endset %}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ (10 ** 4000) ** 4000 }}",
    "{{ '%1000000000d' % 5 }}",
    "{{ '%(a)1000000000d' | format(a=5) }}",
    "{{ '{:1000000000}'.format(5) }}",
    "{{ messages | slice(10 ** 9) }}",
    "{{ messages | batch(10 ** 9, 'x') | list }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5) | replace('x', 'y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5).join(['a'] * 99999) }}",
    "{{ range(99999) | join('x' * 10 ** 5) }}",
    "{{ ([range(99999)] * 99999) | map('sum') | sum }}",
    "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "{{ 5 | round(10 ** 7, 'floor') }}",
    "{% set n = namespace(x='x') %}{% for i in range(99999) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    *(
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}" + use
        for use in ("{{ n.x }}", "{{ n.x | tojson }}", "{{ n.x == [n.x] }}", "{{ n.x ~ '' }}", "{{ [n.x] | string }}")
    ),
    *(
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}{% endfor %}" + use
        for use in (
            "{{ [n.x].count(n.y) }}",
            "{{ [n.x].index(n.y) }}",
            "{{ n.x in [n.y] }}",
            "{% for v in [n.x, n.y] %}{{ loop.changed(v) }}{% endfor %}",
            "{{ [n.x, n.y] | sort }}",
            "{{ [[n.x], [n.y]] | max }}",
        )
    ),
    "{% set n = namespace(x=()) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}.get(n.x) }}",
    *(
        "{% set a = 'a' * 10 ** 6 %}{% set b = 'a' * 10 ** 5 ~ 'b' ~ 'a' * 10 ** 6 %}{{ a." + use + " }}"
        for use in ("rfind(b)", "rsplit('ab' ~ a)", "rpartition('ab' ~ a)", "strip('b' * 10 ** 6 ~ a)")
    ),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_soon_is_a_request_error(source):
    with pytest.raises(RequestError, match="does not end soon"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y' * 10 ** 6) }}",
        "{{ '%*d' % (10 ** 9, 5) }}",
        "{{ '{:{}}'.format(5, 10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ (5).to_bytes(10 ** 9, 'big') }}",
        "{{ lipsum(n=10 ** 7) }}",
        "{% for i in range(99999) recursive %}{{ loop([1, 2]) }}{% endfor %}",
    ],
)
def test_a_function_that_templates_do_not_need_is_refused(source):
    with pytest.raises(RequestError, match="fails on them"):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{% break %}", "{{ 'x' | pprint }}", "{% if 1 %}" * 10**4, "{{ " + "(" * 10**4, "x" * 10**6, "{{ " + "9" * 5000],
)
def test_a_source_that_cannot_be_compiled_is_a_model_error(source):
    with pytest.raises(ModelError, match="Give the prompt as text"):
        ChatTemplate(source, {})


def test_a_long_conversation_is_rendered():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 1000} for i in range(2000)]
    assert len(render(CHATML, messages)) > 10**7


def test_a_format_of_a_million_colons_is_read_in_linear_time():
    before = time.process_time()
    assert len(ChatTemplate("{{ (':' * 10 ** 6).format() }}", {}).render(HI)) == 10**6
    assert time.process_time() - before < 10  # a quadratic search takes minutes


def test_the_work_of_one_render_is_not_charged_to_the_next():
    template = ChatTemplate("{{ ('x' * 5 * 10 ** 6) | length }}", {})
    assert {template.render(HI) for _ in range(5)} == {str(5 * 10**6)}


def test_call_arguments_with_more_values_than_are_read_at_once_are_refused():
    text = json.dumps({"x": [{}] * (MAX_VALUES // 2)})
    messages = [*HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}]
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\].arguments.*values, more than 262144"):
        render("{{ messages[1].tool_calls[0].arguments.x }}", messages)
