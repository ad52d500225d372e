"""Bodies of OpenAI requests become prompts and sampling parameters, or errors that name the field."""

from dataclasses import fields

import pytest

from foreword import SamplingParams
from foreword.errors import RequestError
from foreword.openai import parse_chat, parse_completion
from foreword.openai.request import LABELS, NEUTRAL, SAMPLING

USER = [{"role": "user", "content": "Hi"}]

# The properties of CreateChatCompletionRequest and CreateCompletionRequest in OpenAI's published OpenAPI document.
COMMON_FIELDS = {
    "model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop",
    "stream", "stream_options", "temperature", "top_p", "user",
}  # fmt: skip
CHAT_FIELDS = COMMON_FIELDS | {
    "messages", "audio", "function_call", "functions", "max_completion_tokens", "metadata", "modalities",
    "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "response_format", "safety_identifier", "service_tier", "store", "tool_choice", "tools", "top_logprobs",
    "verbosity", "web_search_options",
}  # fmt: skip
COMPLETION_FIELDS = COMMON_FIELDS | {"prompt", "best_of", "echo", "suffix"}


def chat(**given):
    return parse_chat({"model": "m", "messages": USER, **given})


def completion(**given):
    return parse_completion({"model": "m", "prompt": "Once", **given})


def refusal(parse, **given) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**given)
    return caught.value


@pytest.mark.smoke
def test_openai_defaults_hold():
    assert chat().params == SamplingParams(max_tokens=None, temperature=1.0, top_p=1.0, n=1)
    assert completion().params == SamplingParams(max_tokens=16, temperature=1.0, top_p=1.0, n=1)
    assert (chat().stream, chat().include_usage, completion().echo, chat().model) == (False, False, False, "m")


def test_every_field_reaches_its_parameter():
    given = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "stop": ["a", "b"], "presence_penalty": 0.1,
        "frequency_penalty": -0.2, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
        "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "bad_words": ["x"], "bad_words_token_ids": [[1, 2]], "allowed_token_ids": [1, 2, 3], "best_of": 3,
        "extra_args": {"avoid": [5]},
    }  # fmt: skip
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    expected["bad_words_token_ids"] = ((1, 2),)
    for request in (chat(max_completion_tokens=4, **given), completion(max_tokens=4, **given)):
        params = {name: getattr(request.params, name) for name in given}
        assert params == expected
        assert request.params.max_tokens == 4


def test_every_sampling_parameter_is_a_field_or_has_a_rule_of_its_own():
    own = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs", "detokenize"}
    assert set(SAMPLING) | own == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(("parse", "names"), [(chat, CHAT_FIELDS), (completion, COMPLETION_FIELDS)])
def test_every_openai_field_is_known(parse, names):
    """With a value of no type at all, each is refused for its type or as unsupported, never as unknown."""
    for name in names:
        error = refusal(parse, **{name: {"no": "such type"} if name not in ("metadata", "logit_bias") else 1.5})
        assert error.field.partition(".")[0].partition("[")[0] in (name, "no", "stream_options"), name
        assert "unknown field" not in error.reason or name in ("stream_options",), name


def test_null_counts_as_absent():
    absent = dict.fromkeys(CHAT_FIELDS - {"messages", "model"})
    assert chat(**absent) == chat()


def test_a_label_changes_nothing():
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert set(labels) == set(LABELS)
    assert chat(**labels) == chat()


def test_values_that_ask_for_nothing_are_accepted_and_others_refused():
    for name, values in NEUTRAL.items():
        for value in values:
            assert chat(**{name: value}) == chat()
        error = refusal(chat, **{name: "something"})
        assert (error.field, error.reason) == (name, "is not supported")


def test_an_unknown_field_is_named_with_the_nearest_known():
    error = refusal(chat, temprature=1.0)
    assert error.field == "temprature"
    assert error.fix == "Did you mean 'temperature'?"
    assert refusal(chat, prompt_logprobs=1).field == "prompt_logprobs"  # it would have no place in the response


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("temperature", 101), ("n", 1.0), ("n", True), ("n", 0),
        ("stop", [1]), ("stop", {"a": 1}), ("stop", ""), ("seed", "7"), ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": "1"}), ("logit_bias", [5]), ("stop_token_ids", [1.5]), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("top_p", 0), ("max_tokens", 0), ("model", 5), ("stream", "yes"), ("user", 3),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(name, value):
    assert refusal(chat, **{name: value}).field == name
    assert refusal(completion, **{name: value}).field == name


@pytest.mark.parametrize("body", [None, 5, "x", [], [{}]])
def test_a_body_is_an_object(body):
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError, match="expected a JSON object"):
            parse(body)


def test_messages_and_prompt_are_required():
    with pytest.raises(RequestError, match="messages = None: is missing"):
        parse_chat({"model": "m"})
    with pytest.raises(RequestError, match="prompt = None: is missing"):
        parse_completion({"model": "m"})
    assert refusal(chat, messages="Hi").field == "messages"
    assert refusal(chat, messages=["Hi"]).field == "messages"


def test_the_developer_is_the_system():
    messages = [{"role": "developer", "content": "Be brief."}, *USER]
    assert chat(messages=messages).messages == [{"role": "system", "content": "Be brief."}, *USER]
    assert messages[0]["role"] == "developer"


def test_both_names_of_the_limit_agree():
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).field == "max_completion_tokens"


def test_log_probabilities_of_a_chat_are_asked_for_by_two_fields():
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert refusal(chat, top_logprobs=3).field == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=-1).field == "top_logprobs"
    assert refusal(chat, logprobs=3).field == "logprobs"


def test_log_probabilities_of_a_completion_are_a_number():
    assert completion(logprobs=3).params.logprobs == 3
    assert completion(logprobs=3, echo=True).params.prompt_logprobs == 3
    assert refusal(completion, logprobs=True).field == "logprobs"
    assert refusal(completion, logprobs=-1).field == "logprobs"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)  # fmt: skip
def test_a_prompt_is_a_text_token_ids_or_a_list_of_these(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [[], 5, {"a": 1}, [None], ["a", 5], [[1], "a", [1.5]], [True]])
def test_a_wrong_prompt_is_named(prompt):
    assert refusal(completion, prompt=prompt).field.startswith("prompt")


def test_the_response_format_becomes_structured_outputs():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for given, expected in (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"response_format": wanted}, {"json": schema}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, {"regex": "a+"}),
    ):
        for request in (chat(**given), completion(**given)):
            made = SamplingParams(structured_outputs=expected)
            assert request.params.structured_outputs == made.structured_outputs
    assert refusal(chat, response_format={"type": "xml"}).field == "response_format.type"
    assert refusal(chat, response_format={"type": "json_schema"}).field == "response_format.json_schema.schema"
    assert refusal(chat, response_format=wanted, structured_outputs={"regex": "a"}).field == "response_format"


def test_a_stream_and_its_usage():
    request = chat(stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage) == (True, True)
    assert refusal(chat, stream_options={"include_usage": True}).field == "stream_options"
    assert refusal(chat, stream=True, stream_options={"usage": True}).field == "stream_options.usage"


def test_options_of_the_engine_and_the_template():
    request = chat(priority=2, cache_salt="s", chat_template_kwargs={"enable_thinking": False})
    assert request.options == {"priority": 2, "cache_salt": "s"}
    assert request.chat["template"] == {"enable_thinking": False}
    assert request.chat["add_generation_prompt"]


def test_tools_and_their_choice():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    named = {"type": "function", "function": {"name": "f"}}
    request = chat(tools=tools, tool_choice=named, parallel_tool_calls=False)
    assert (request.chat["tools"], request.chat["tool_choice"]) == (tools, named)
    assert request.chat["parallel_tool_calls"] is False
    for choice in ("none", "auto", "required"):
        assert chat(tools=tools, tool_choice=choice).chat["tool_choice"] == choice
    assert refusal(chat, tools="f").field == "tools"
    assert refusal(chat, tool_choice="f").field == "tool_choice"
    assert refusal(chat, tool_choice={"type": "custom"}).field == "tool_choice.type"


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt"])
def test_a_template_variable_is_no_other_field(name):
    assert refusal(chat, chat_template_kwargs={name: 1}).field == f"chat_template_kwargs.{name}"


def test_biases_have_integer_keys():
    assert chat(logit_bias={"5": -100, "7": 0.5}).params.logit_bias == {5: -100.0, 7: 0.5}
