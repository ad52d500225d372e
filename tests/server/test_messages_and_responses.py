"""Anthropic's and OpenAI's Responses clients, unchanged, with a running server."""

import json
import shutil
from contextlib import ExitStack

import pytest
from server_rig import PATIENCE, serving, with_template

import anthropic
import openai
from computing import replace_compute

HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def clients():
    """Makes Anthropic's and OpenAI's client of a server."""
    with ExitStack() as stack:

        def make(server):
            options = {"api_key": "secret", "max_retries": 0, "timeout": PATIENCE}
            claude = anthropic.Anthropic(base_url=server.url, **options)
            client = openai.OpenAI(base_url=f"{server.url}/v1", **options)
            return stack.enter_context(claude), stack.enter_context(client)

        yield make


@pytest.fixture(scope="module")
def talking(talker):
    with serving(talker, api_key=("secret",)) as server:
        yield server


@pytest.fixture(scope="module")
def calling(talker, tmp_path_factory):
    """Every answer is a call of a tool."""
    model = with_template(talker, tmp_path_factory.mktemp("models") / "caller", TEMPLATE)
    with serving(model, script=CALL) as server:
        yield server


def ask(claude, **more):
    options = {"model": "talker", "max_tokens": 9, "messages": HI, **more}
    whole = claude.messages.create(**options, extra_body={"temperature": 0})
    with claude.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        return whole, stream.get_final_message()


def test_both_dialects_give_the_text_of_a_chat(talking, clients):
    whole, streamed = ask(clients(talking)[0])
    _, client = clients(talking)
    chat = client.chat.completions.create(model="talker", messages=HI, max_tokens=9, temperature=0)
    options = {"model": "talker", "input": "Hi", "max_output_tokens": 9, "temperature": 0}
    response = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        *_, last = stream
    text = chat.choices[0].message.content
    assert [block.text for block in (*whole.content, *streamed.content)] == [text, text]
    assert (response.output_text, last.type, last.response.output_text) == (text, "response.incomplete", text)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    for usage in (whole.usage, streamed.usage):
        prompt = usage.input_tokens + usage.cache_read_input_tokens
        assert (prompt, usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    assert streamed.usage.cache_read_input_tokens > 0


def test_a_stop_sequence_is_reported(talking, clients):
    text = ask(clients(talking)[0])[0].content[0].text
    for message in ask(clients(talking)[0], stop_sequences=[text[4:6]]):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[4:6])
        assert message.content[0].text == text[: text.index(text[4:6])]


def test_tokens_are_counted_as_they_are_used(talking, clients):
    claude, _ = clients(talking)
    more = {"system": "Be brief", "messages": [*HI, {"role": "assistant", "content": "a"}, *HI]}
    counted = claude.messages.count_tokens(model="talker", **more).input_tokens
    usage = ask(clients(talking)[0], **more)[0].usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_calls_of_tools_come_whole_and_streamed(calling, clients):
    tool = {"name": "weather", "input_schema": SCHEMA}
    for message in ask(clients(calling)[0], tools=[tool], max_tokens=200):
        text, call = message.content
        assert (text.text, call.name, call.input) == ("I look.", "weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
    _, client = clients(calling)
    options = {
        "model": "talker",
        "input": "Hi",
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    }
    whole = client.responses.create(**options)
    *_, last = client.responses.create(**options, stream=True)
    for response in (whole, last.response):
        message, call = response.output
        assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
            "I look.",
            "weather",
            {"city": "Paris"},
        )
        assert response.status == "completed"


def test_the_result_of_a_call_goes_back(calling, clients):
    claude, client = clients(calling)
    options = {"model": "talker", "max_tokens": 200, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    message = claude.messages.create(**options, messages=HI)
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "sunny"}
    turns = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**options, messages=turns).stop_reason == "tool_use"
    options = {"model": "talker", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    output = client.responses.create(**options, input="Hi").output
    result = {"type": "function_call_output", "call_id": output[1].call_id, "output": "sunny"}
    turns = [{"role": "user", "content": "Hi"}, *output, result]
    assert client.responses.create(**options, input=turns).output[1].name == "weather"


def test_errors_have_the_form_of_the_dialect(talking, clients):
    claude, client = clients(talking)
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="talker", max_tokens=9, messages=HI, extra_body={"container": "x"})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "container" in caught.value.message
    with pytest.raises(anthropic.NotFoundError, match="talker"):
        claude.messages.create(model="claude", max_tokens=9, messages=HI)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.count_tokens(model="talker", messages=HI)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="talker", input="Hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_a_conversation_with_a_model_without_a_chat_template_is_refused_as_the_clients_fault(talker, tmp_path):
    model = tmp_path / "base"
    shutil.copytree(talker, model)
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with serving(model) as running:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/messages", {"messages": HI, "max_tokens": 4, "model": running.context.names[0]}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            answer = running.post(path, body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "no chat template" in answer.json()["error"]["message"]
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_closed_stream_ends_its_request(talking, clients):
    claude, _ = clients(talking)
    with claude.messages.stream(model="talker", max_tokens=3000, messages=HI) as stream:
        next(iter(stream.text_stream))
    talking.check_nothing_is_left()


def test_a_long_wait_has_pings(talker):
    with serving(talker, keep_alive=0.05) as server, server.held(), server.client() as client:
        body = {"model": "talker", "max_tokens": 1, "messages": HI, "stream": True}
        with client.stream("POST", "/v1/messages", json=body) as response:
            assert next(response.iter_lines()) == "event: ping"


def test_a_failed_step_ends_a_stream_with_an_error_and_the_server_goes_on(talker, clients):
    with serving(talker) as server:
        claude, client = clients(server)
        compute = server.llm.engine.executor.compute
        steps = 0

        def broken(batch, logits_indices):
            nonlocal steps
            steps += 1
            if steps % 5 == 0:
                raise RuntimeError("broken on purpose")
            return compute(batch, logits_indices)

        replace_compute(server.llm.engine.executor, broken)
        options = {"model": "talker", "max_tokens": 50, "messages": HI}
        failed = pytest.raises(anthropic.APIStatusError, match="a step of the engine failed")
        with failed, claude.messages.stream(**options) as s:
            s.get_final_message()
        *_, last = client.responses.create(model="talker", input="Hi", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert "a step of the engine failed" in last.response.error.message
        replace_compute(server.llm.engine.executor, compute)
        assert ask(claude)[0].stop_reason == "max_tokens"


ODD = {"type": "object", "properties": {"a": {"not": {}}}}
CUT = '{"city": "Pa'
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": CUT}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": ODD}}],
                              "tool_choice": "required"}, "tools[0].function.parameters.properties.a"),
        ("chat/completions", {"response_format": {"type": "json_object", "schema": ODD}},
         "response_format.schema.properties.a"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": ODD}}},
         "text.format.schema.properties.a"),
        ("responses", {"tools": [{"type": "function", "name": "f", "parameters": ODD, "strict": True}]},
         "tools[0].parameters.properties.a"),
        ("responses", {"input": [*HI, {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[1].content[0]"),
        ("messages", {"tools": [{"name": "f", "input_schema": ODD}], "tool_choice": {"type": "any"}},
         "tools[0].input_schema.properties.a"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": ODD}}},
         "output_config.format.schema.properties.a"),
        ("messages/count_tokens", {"messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "data:,"}}]}
        ]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_was_sent(calling, path, body, field):
    given = {"model": "talker", **({"input": "Hi"} if path == "responses" else {"messages": HI})}
    given |= {"max_tokens": 5} if path == "messages" else {}
    answer = calling.post(f"/v1/{path}", {**given, **body}, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"{field} = " in error["message"]
    assert error.get("param", field) == field
    assert "structured_outputs" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]}),
        ("responses", {"input": [*HI, {"type": "function_call", "call_id": "1", "name": "weather", "arguments": CUT}]}),
        ("messages", {"max_tokens": 5, "messages": [
            *HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": CUT}]}, *HI
        ]}),
    ],
)  # fmt: skip
def test_a_conversation_goes_on_after_a_call_that_was_cut(calling, path, body):
    answer = calling.post(f"/v1/{path}", {"model": "talker", **body}, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200, answer.text
