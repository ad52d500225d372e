"""The routes of OpenAI, whole and as streams."""

import json

import pytest
from server_rig import HI, TEMPLATE, serving, with_template

from foreword import LLM, SamplingParams

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker) as running:
        yield running
        running.check_nothing_is_left()


@pytest.fixture(scope="module")
def greedy(talker):
    """The tiny model's answers without a server."""
    llm = LLM(str(talker), executor="numpy", max_model_len=4096)
    yield lambda prompt, **fields: llm.generate(prompt, SamplingParams(temperature=0.0, **fields))[0].outputs[0]
    llm.close()


def test_a_completion_is_what_the_model_gives(server, greedy):
    body = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 20, "temperature": 0}).json()
    (choice,) = body["choices"]
    assert choice["text"] == greedy("Once", max_tokens=20).text
    assert (choice["finish_reason"], body["model"], body["usage"]["completion_tokens"]) == ("length", "talker", 20)


def test_the_frames_of_a_stream_add_up_to_the_whole_answer(server, greedy):
    frames = server.frames("/v1/completions", {"prompt": "Once", "max_tokens": 20, "temperature": 0})
    assert "".join(frame["choices"][0]["text"] for frame in frames) == greedy("Once", max_tokens=20).text
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None] * (len(frames) - 1) + ["length"]


def test_a_chat_is_one_role_then_content_then_the_end(server):
    whole = server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 12, "temperature": 0}).json()
    frames = server.frames("/v1/chat/completions", {"messages": HI, "max_tokens": 12, "temperature": 0})
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == whole["choices"][0]["message"]["content"]
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    assert {frame["id"] for frame in frames} == {frames[0]["id"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_is_the_last_frame_if_it_is_wanted(server, path):
    body = {"max_tokens": 5, "stream_options": {"include_usage": True}}
    body |= {"messages": HI} if "chat" in path else {"prompt": ["ab", "c"]}
    *others, last = server.frames(path, body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == (5 if "chat" in path else 10)
    assert all(frame["usage"] is None and len(frame["choices"]) == 1 for frame in others)


def test_several_prompts_and_choices_in_one_stream_have_their_own_numbers(server, greedy):
    body = {"prompt": ["Once", "The sky"], "n": 2, "max_tokens": 9, "temperature": 0}
    texts = dict.fromkeys(range(4), "")
    for frame in server.frames("/v1/completions", body):
        (choice,) = frame["choices"]
        texts[choice["index"]] += choice["text"]
    wanted = [greedy(prompt, max_tokens=9).text for prompt in body["prompt"]]
    assert list(texts.values()) == [wanted[0], wanted[0], wanted[1], wanted[1]]
    whole = server.post("/v1/completions", body).json()["choices"]
    assert [choice["text"] for choice in whole] == list(texts.values())


def test_echo_and_log_probabilities_are_the_same_in_a_stream(server):
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2}
    (whole,) = server.post("/v1/completions", body).json()["choices"]
    frames = [frame["choices"][0] for frame in server.frames("/v1/completions", body)]
    assert "".join(choice["text"] for choice in frames) == whole["text"]
    for name, wanted in whole["logprobs"].items():
        assert [value for choice in frames for value in choice["logprobs"][name]] == wanted
    assert whole["logprobs"]["tokens"][:4] == list("Once")
    assert whole["logprobs"]["text_offset"] == list(range(8))


@pytest.mark.parametrize(("written", "text"), [("é", "aé"), ("a", "aa")])
def test_half_a_character_of_a_prompt_is_in_no_text_unless_the_output_completes_it(server, written, text):
    a, half, *_ = server.post("/tokenize", {"prompt": "aé"}).json()["tokens"]
    *_, token = server.post("/tokenize", {"prompt": written}).json()["tokens"]
    body = {"prompt": [a, half], "max_tokens": 1, "temperature": 0, "logit_bias": {str(token): 100}}
    for echo, whole in ((True, text), (False, text.removeprefix("a"))):
        assert server.post("/v1/completions", {**body, "echo": echo}).json()["choices"][0]["text"] == whole
        frames = server.frames("/v1/completions", {**body, "echo": echo})
        assert "".join(frame["choices"][0]["text"] for frame in frames) == whole


def test_log_probabilities_of_a_chat_are_the_same_in_a_stream(server):
    body = {"messages": HI, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    server.post("/v1/chat/completions", body)  # both find the prompt cached: NumPy's last bits depend on the shapes
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    frames = [frame["choices"][0]["logprobs"] for frame in server.frames("/v1/chat/completions", body)]
    assert [entry for found in frames if found for entry in found["content"]] == whole
    assert len(whole) == 4


def test_the_best_of_several_come_at_the_end(server):
    body = {"prompt": "Once", "max_tokens": 5, "best_of": 3, "n": 2, "temperature": 1.0, "seed": 3}
    whole = server.post("/v1/completions", body).json()["choices"]
    frames = server.frames("/v1/completions", body)
    assert [frame["choices"][0]["text"] for frame in frames] == [choice["text"] for choice in whole]


def test_one_request_gives_the_tokens_that_it_gives_among_64(server):
    body = {"prompt": "Once upon", "max_tokens": 16, "temperature": 1.0, "seed": 11}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    crowd = server.post("/v1/completions", {**body, "prompt": ["Once upon"] * 64}).json()["choices"]
    assert {choice["text"] for choice in crowd} == {alone}


@pytest.fixture(scope="module")
def caller(talker, tmp_path_factory):
    """A server whose model thinks, then calls a tool twice; one argument contains the closing mark."""
    template = TEMPLATE + "{# <think> <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}"
    script = (
        '<think>Look it up.</think>One moment.<tool_call>\n{"name": "look", "arguments": {"at": "</tool_call>"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    )
    folder = with_template(talker, tmp_path_factory.mktemp("models") / "caller", template)
    with serving(folder, script=script) as running:
        yield running


@pytest.mark.long
def test_reasoning_and_parallel_calls_are_read_from_the_text_whole_and_streamed(caller):
    body = {"messages": HI, "tools": [TOOL], "max_tokens": 400}
    (choice,) = caller.post("/v1/chat/completions", body).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "Look it up.",
        "One moment.",
        "tool_calls",
    )
    whole = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert whole == [("look", {"at": "</tool_call>"}), ("look", {})]
    calls, texts = {}, {"content": "", "reasoning_content": ""}
    for frame in caller.frames("/v1/chat/completions", body):
        delta = frame["choices"][0]["delta"]
        for name in texts:
            texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"name": "", "arguments": "", "id": call.get("id")})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    assert texts == {"content": "One moment.", "reasoning_content": "Look it up."}
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == whole
    assert all(call["id"] for call in calls.values())
    assert frame["choices"][0]["finish_reason"] == "tool_calls"


def test_what_cannot_be_served_names_the_field(server):
    for path, body, field in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "b"}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_token": 3}, "max_token"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a" * 5000}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 5000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a" * 5000]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1, 99999]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "a", "timeout": "soon"}, "timeout"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 5000}, "input"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
        ),
        ("/v1/chat/completions", {"messages": HI, "response_format": {"type": "json_schema"}}, None),
    ):
        for stream in (False, True):
            response = server.post(path, {**body, "stream": stream})
            error = response.json()["error"]
            assert response.status_code == 400, (path, body)
            assert error["type"] == "invalid_request_error"
            assert error["param"] == (field or "response_format.json_schema.schema")
            assert error["message"]


@pytest.mark.parametrize("schema", [{"not": {"type": "string"}}, {"type": 3}])
def test_a_grammar_that_cannot_be_followed_is_refused_and_not_dropped(server, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.post("/v1/chat/completions", {"messages": HI, "response_format": wanted})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"


def test_an_answer_follows_its_schema(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    schema["properties"]["a"] |= {"minimum": 1, "maximum": 99}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": HI, "response_format": wanted, "max_tokens": 50}
    text = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert 1 <= json.loads(text)["a"] <= 99
