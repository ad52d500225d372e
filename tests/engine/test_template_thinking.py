"""Options of a conversation for its model's thinking reach the chat template, or are refused."""

import pytest

from foreword.anthropic import parse_messages
from foreword.engine.chat import chat_options, make_chat
from foreword.engine.defaults import DEFAULT_PARAMS
from foreword.engine.thinking import EFFORTS
from foreword.errors import RequestError
from foreword.models.tokenizer import Tokenizer
from foreword.openai import parse_chat, parse_responses
from foreword.server.tokens import parse_tokenize
from models import vocabularies

ASK = [{"role": "user", "content": "hello"}]
PLAIN = "{{ messages[0].content }}"
TEMPLATES = {
    "plain": PLAIN,
    # gpt-oss, too, sets the variable where it is not given.
    "effort": "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ reasoning_effort }} " + PLAIN,
    # Qwen3 and DeepSeek-V3.1 have such a line.
    "switch": PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
    "off": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + PLAIN + "{{ thinking }}</think>",
    "both": PLAIN + "{{ reasoning_effort }} {{ enable_thinking }}<think>",
    "always": PLAIN + "<think>",
}
TOKENIZERS = {
    name: Tokenizer.from_gguf(vocabularies.byte_level(chat_template=text)) for name, text in TEMPLATES.items()
}
LIMIT = 1000


def text(name, **options):
    tokenizer = TOKENIZERS[name]
    return make_chat(tokenizer, ASK, DEFAULT_PARAMS, LIMIT, chat_options(tokenizer, options)).text


def refusal(name, **options):
    with pytest.raises(RequestError) as error:
        text(name, **options)
    return error.value


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("effort", {}, "medium hello"),
        *(("effort", {"reasoning_effort": effort}, f"{effort} hello") for effort in EFFORTS),
        ("switch", {"reasoning_effort": "none"}, "hello<think></think>"),
        ("switch", {"reasoning_effort": "medium"}, "hello"),
        ("switch", {"thinking": True}, "hello"),
        ("switch", {"thinking": False}, "hello<think></think>"),
        ("switch", {"template": {"enable_thinking": False}}, "hello<think></think>"),
        ("switch", {"template": {"enable_thinking": False}, "thinking": False}, "hello<think></think>"),
        ("off", {"thinking": True}, "helloTrue</think>"),
        ("off", {"reasoning_effort": "none"}, "helloFalse</think>"),
        ("both", {"reasoning_effort": "low"}, "hellolow <think>"),
        ("both", {"reasoning_effort": "none"}, "hellonone False<think>"),
        ("both", {"reasoning_effort": "high", "thinking": True}, "hellohigh True<think>"),
        ("always", {"thinking": True}, "hello<think>"),
        ("always", {"reasoning_effort": "medium"}, "hello<think>"),
        ("plain", {"reasoning_effort": "none"}, "hello"),
        ("plain", {"reasoning_effort": "medium"}, "hello"),
        ("plain", {"thinking": False}, "hello"),
        ("plain", {"template": {"enable_thinking": False, "documents": [], "date": None}}, "hello"),
    ],
)
def test_the_template_has_what_is_asked_for(name, options, expected):
    assert text(name, **options) == expected


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("plain", {"reasoning_effort": "low"}, "reasoning_effort", "does not read it. Give 'medium', which is"),
        ("switch", {"reasoning_effort": "high"}, "reasoning_effort", "Give 'none' for no thinking, 'medium', which is"),
        ("plain", {"thinking": True}, "thinking", "the model's chat template has no thinking"),
        ("always", {"thinking": False}, "thinking", "the model always thinks"),
        ("always", {"reasoning_effort": "none"}, "reasoning_effort", "the model always thinks"),
        ("always", {"template": {"enable_thinking": False}}, "template.enable_thinking", "does not read it"),
        ("plain", {"template": {"enable_thinking": True}}, "template.enable_thinking", "does not read it"),
        ("switch", {"template": {"enable_thinkin": True}}, "template.enable_thinkin", "Did you mean 'enable_thinking'"),
        ("switch", {"template": {"enable_thinking": True}, "reasoning_effort": "none"}, "template.enable_thinking",
         "reasoning_effort or thinking asks for False"),
        ("plain", {"reasoning_effort": "much"}, "reasoning_effort", "must be one of 'none', 'minimal', 'low'"),
        ("plain", {"reasoning_effort": 3}, "reasoning_effort", "must be one of 'none'"),
        ("plain", {"thinking": "yes"}, "thinking", "expected True or False"),
    ],
)  # fmt: skip
def test_what_the_template_cannot_do_is_refused(name, options, field, message):
    error = refusal(name, **options)
    assert error.field == field
    assert message in str(error)


def field_of(request, tokenizer):
    with pytest.raises(RequestError) as error:
        make_chat(tokenizer, request.messages, request.params, LIMIT, request.chat)
    return error.value.renamed(request.origins).field


def test_bodies_ask_for_an_effort_and_their_errors_have_its_path():
    chat = parse_chat({"messages": ASK, "reasoning_effort": "low"})
    responses = parse_responses({"input": "hello", "reasoning": {"effort": "low"}})
    assert chat.chat["reasoning_effort"] == responses.chat.chat["reasoning_effort"] == "low"
    assert responses.echo["reasoning"] == {"effort": "low", "summary": None}
    plain = TOKENIZERS["plain"]
    assert field_of(chat, plain) == "reasoning_effort"
    assert field_of(responses.chat, plain) == "reasoning.effort"
    for parse, body in ((parse_chat, {"messages": ASK}), (parse_responses, {"input": "hello"})):
        asked = parse({**body, "chat_template_kwargs": {"zebra": 1}})
        assert field_of(asked.chat if parse is parse_responses else asked, plain) == "chat_template_kwargs.zebra"
    for effort, text in (("low", "low hello"), ("max", "max hello"), ("high", "medium hello")):  # "high": as unasked
        body = {"model": "m", "max_tokens": 2000, "messages": ASK, "output_config": {"effort": effort}}
        messages = parse_messages(body)
        found = make_chat(TOKENIZERS["effort"], messages.messages, messages.params, LIMIT, messages.chat)
        assert found.text == text
        if effort != "high":
            assert field_of(messages, plain) == "output_config.effort"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = parse_messages({"model": "m", "max_tokens": 2000, "messages": ASK, "thinking": thinking})
    assert field_of(messages, plain) == "thinking"
    assert (
        make_chat(TOKENIZERS["always"], messages.messages, messages.params, LIMIT, messages.chat).text == "hello<think>"
    )


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [(parse_chat, {"messages": ASK, "reasoning_effort": "much"}, "reasoning_effort"),
     (parse_responses, {"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort")],
)  # fmt: skip
def test_another_effort_is_refused_with_those_that_exist(parse, body, field):
    with pytest.raises(RequestError, match=r"'none' or 'minimal' or 'low' or 'medium' or 'high' or 'xhigh'") as error:
        parse(body)
    assert error.value.field == field


def test_tokenize_refuses_a_variable_that_the_template_does_not_read():
    body = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}
    assert TOKENIZERS["switch"].decode(parse_tokenize(body).encode(TOKENIZERS["switch"], LIMIT)).endswith("</think>")
    body["chat_template_kwargs"] = {"zebra": 1}
    with pytest.raises(RequestError) as error:
        parse_tokenize(body).encode(TOKENIZERS["switch"], LIMIT)
    assert error.value.field == "chat_template_kwargs.zebra"
