"""Bodies of OpenAI requests become prompts and sampling parameters, or errors that name the field."""

from dataclasses import fields, replace

import pytest

from foreword import SamplingParams
from foreword.anthropic import parse_messages
from foreword.errors import RequestError
from foreword.openai import neutral, parse_chat, parse_completion, parse_responses
from foreword.openai.pooling import parse_embeddings
from foreword.openai.request import LABELS, SAMPLING

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
        assert error.field.partition(".")[0].partition("[")[0] == name
        assert "unknown field" not in error.reason or name in ("stream_options",), name


def test_null_counts_as_absent():
    absent = dict.fromkeys(CHAT_FIELDS - {"messages", "model"})
    assert chat(**absent) == chat()


def test_a_label_changes_nothing():
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert set(labels) == set(LABELS)
    assert chat(**labels) == chat()


def messages(**given):
    return parse_messages({"model": "m", "max_tokens": 9, "messages": USER, **given})


def responses(**given):
    return parse_responses({"model": "m", "input": "Hi", **given})


def embeddings(**given):
    return parse_embeddings({"model": "m", "input": "Hi", **given})


TABLES = {
    chat: neutral.CHAT, completion: neutral.COMPLETION, responses: neutral.RESPONSES, messages: neutral.MESSAGES,
    embeddings: neutral.POOLING,
}  # fmt: skip


@pytest.mark.parametrize("parse", TABLES, ids=lambda parse: parse.__name__)
def test_values_that_ask_for_nothing_are_accepted_and_others_refused(parse):
    for name, values in TABLES[parse].items():
        for value in values:
            assert parse(**{name: value}) == parse(), (name, value)
        error = refusal(parse, **{name: "something"})
        assert (error.field, error.reason) == (name, "is not supported")


NOTHING = {
    "openai": {
        "n": 1, "logprobs": False, "store": False, "service_tier": "auto", "parallel_tool_calls": True, "tools": [],
        "stream_options": {"include_usage": False, "include_obfuscation": False}, "response_format": {"type": "text"},
        "verbosity": "medium", "top_logprobs": 0, "logit_bias": {}, "stop": [],
        "modalities": ["text"], "tool_choice": "auto", "metadata": {}, "user": "me", "max_completion_tokens": -1,
    },
    "vllm": {
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "stop_token_ids": [],
        "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "echo": False, "add_generation_prompt": True, "bad_words": [],
        "continue_final_message": False, "add_special_tokens": False, "documents": None, "chat_template": None,
        "chat_template_kwargs": {}, "use_beam_search": False, "return_token_ids": False,
        "mm_processor_kwargs": {},
    },
    "text-generation-webui": {
        "max_tokens": -1, "top_k": 0, "typical_p": 1, "tfs": 1, "mirostat_mode": 0, "grammar_string": "",
        "guidance_scale": 1, "negative_prompt": "", "smoothing_factor": 0, "dynamic_temperature": False, "top_a": 0,
        "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0, "do_sample": True,
        "add_bos_token": True, "ban_eos_token": False, "epsilon_cutoff": 0, "eta_cutoff": 0, "banned_tokens": "",
        "custom_token_bans": "", "temperature_last": False, "num_beams": 1, "early_stopping": False,
        "xtc_probability": 0, "dry_multiplier": 0, "top_n_sigma": 0,
    },
    "llama.cpp": {"n_probs": 0, "cache_prompt": True, "mirostat": 0, "min_keep": 0, "grammar": "", "dynatemp_range": 0},
}  # fmt: skip
"""What clients send with the defaults of each server."""


@pytest.mark.parametrize("client", NOTHING)
def test_the_defaults_of_clients_change_nothing(client):
    plain, given = chat().params, chat(**NOTHING[client])
    no_tools = {**given.chat, "tools": given.chat["tools"] or None}
    assert replace(given, params=plain, chat=no_tools) == chat()
    params = replace(given.params, top_k=max(given.params.top_k, 0))
    assert replace(params, logit_bias=None) == plain


def test_a_completion_without_log_probabilities_or_a_limit():
    assert completion(logprobs=False) == completion()
    assert completion(logprobs=0).params.logprobs == 0
    assert refusal(completion, logprobs=True).field == "logprobs"
    assert completion(max_tokens=-1).params.max_tokens is None
    assert responses(max_output_tokens=-1) == responses()
    assert refusal(completion, max_tokens=-2).field == "max_tokens"
    assert refusal(responses, max_output_tokens=0).field == "max_output_tokens"


def test_a_sampler_that_is_not_there_is_refused_with_what_is():
    assert "min_p" in refusal(chat, tfs_z=0.9).fix
    assert "structured_outputs" in refusal(chat, grammar="root ::= x").fix


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


def test_both_names_of_the_limit_agree():
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).field == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=0).field == "max_completion_tokens"
    assert refusal(chat, max_tokens=0).field == "max_tokens"


def test_log_probabilities_of_a_chat_are_asked_for_by_two_fields():
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert refusal(chat, top_logprobs=3).field == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=-1).field == "top_logprobs"
    assert refusal(chat, logprobs=3).field == "logprobs"


def test_one_of_two_structures_is_refused_as_it_was_sent():
    asked = {"type": "json_object"}
    error = refusal(chat, response_format=asked, structured_outputs={"regex": "a"})
    assert (error.field, error.value) == ("response_format", asked)


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
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {"max_pixels": 9}}
    request = chat(priority=2, cache_salt="s", **kwargs)
    assert request.chat["mm_processor_kwargs"] == {"max_pixels": 9}
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
