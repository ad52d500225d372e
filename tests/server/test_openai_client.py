"""The `openai` client, unchanged."""

import pytest
from server_rig import HI, serving

import openai

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, api_key=("secret",), max_requests=64) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_chats(client):
    options = {"model": "talker", "messages": HI, "max_tokens": 6, "temperature": 0.0}
    whole = client.chat.completions.create(**options)
    assert whole.usage.completion_tokens == 6
    with client.chat.completions.create(**options, stream=True) as chunks:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(**options, stop=text[4]) as stream:
        assert text.startswith(stream.get_final_completion().choices[0].message.content)


def test_completions(client):
    options = {"model": "talker", "prompt": "Once", "max_tokens": 6, "temperature": 0.0, "logprobs": 1}
    whole = client.completions.create(**options)
    assert len(whole.choices[0].logprobs.tokens) == 6
    chunks = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [6]


def test_parameters_of_vllm_pass_through_extra_body(client):
    extra = {"top_k": 3, "min_p": 0.1, "ignore_eos": True, "cache_salt": "a", "priority": 0}
    done = client.completions.create(model="talker", prompt="a", max_tokens=3, extra_body=extra)
    assert done.usage.completion_tokens == 3


def test_structured_answers(client):
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(model="talker", messages=HI, response_format=described, max_tokens=40)
    assert found.choices[0].message.content.startswith('{"a"')


def test_models(client):
    assert [model.id for model in client.models.list()] == ["talker", "other"]
    assert client.models.retrieve("talker").id == "talker"


def test_errors_have_the_clients_types_and_the_field(server, client):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="talker", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.RateLimitError), server.context_is_full():
        client.completions.create(model="talker", prompt="a")
    with pytest.raises(openai.APIError), server.held():
        list(client.completions.create(model="talker", prompt="a", stream=True, extra_body={"timeout": 0.1}))
