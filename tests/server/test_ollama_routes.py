"""Ollama's routes, called by its own client, and what they refuse."""

import json
import re
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import ollama
import pytest
from server_rig import HI, serving
from several_rig import serving_several

from foreword import __version__
from foreword.errors import RequestError
from foreword.models import registry
from foreword.models.loader import find_model
from foreword.models.ollama_names import LIBRARY, from_ollama
from foreword.ollama import parse_chat, parse_embed, parse_generate
from foreword.server.served import ServedModel

SCRIPT = "Hello, world."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|><think>"


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, script=SCRIPT, engine={"max_model_len": 512}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with ollama.Client(server.url, trust_env=False) as found:
        yield found


def test_a_chat_is_answered_as_a_whole_and_in_pieces(client):
    whole = client.chat("talker", HI, options={"temperature": 0})
    assert (whole.message.role, whole.message.content, whole.done, whole.done_reason) == (
        "assistant", SCRIPT, True, "stop",
    )  # fmt: skip
    assert (whole.model, whole.eval_count, whole.prompt_eval_count) == ("talker", len(SCRIPT) + 1, 5)
    assert whole.total_duration >= whole.eval_duration > 0
    assert abs(datetime.fromisoformat(whole.created_at) - datetime.now(UTC)) < timedelta(minutes=5)
    pieces = list(client.chat("talker:latest", HI, stream=True))
    assert "".join(piece.message.content for piece in pieces) == SCRIPT
    assert [piece.done for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert (pieces[-1].eval_count, pieces[-1].done_reason) == (whole.eval_count, "stop")


def test_a_stream_is_lines_of_json(server):
    with server.client() as http, http.stream("POST", "/api/chat", json={"model": "talker", "messages": HI}) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert all(line["message"]["role"] == "assistant" for line in lines)


def test_a_prompt_is_answered_through_the_template_or_raw(client, server):
    through = client.generate("talker", "Hi", system="Be brief.")
    assert (through.response, through.prompt_eval_count) == (SCRIPT, 5 + len("Be brief.") + 2)
    assert client.generate("talker", "Hi", raw=True).prompt_eval_count == 2
    assert "".join(piece.response for piece in client.generate("talker", "Hi", stream=True)) == SCRIPT
    limited = client.generate("talker", "Hi", options={"num_predict": 3, "stop": ["zz"], "num_ctx": 512, "seed": 1})
    assert (limited.response, limited.done_reason) == (SCRIPT[:3], "length")
    stopped = client.generate("talker", "Hi", options={"stop": ["wor"], "num_predict": -1})
    assert stopped.response == "Hello, "


def test_num_ctx_bounds_the_prompt_with_its_answer(client):
    prompt = "x" * 20
    for limit, length in ((27, 7), (21, 1), (512, len(SCRIPT))):
        found = client.generate("talker", prompt, raw=True, options={"num_ctx": limit, "num_predict": -1})
        assert (found.response, found.prompt_eval_count) == (SCRIPT[:length], 20)
        assert found.done_reason == ("length" if length < len(SCRIPT) else "stop")
    chat = client.chat("talker", HI, options={"num_ctx": 9, "num_predict": 100})
    assert (chat.prompt_eval_count, chat.eval_count, chat.done_reason) == (5, 4, "length")
    for call in (
        lambda: client.generate("talker", prompt, raw=True, options={"num_ctx": 20}),
        lambda: client.chat("talker", [{"role": "user", "content": prompt}], options={"num_ctx": 20}, stream=False),
    ):
        with pytest.raises(
            ollama.ResponseError, match=r"options\.num_ctx = 20: the prompt has \d\d tokens or more"
        ) as error:
            call()
        assert error.value.status_code == 400
    calls = (
        lambda wrong: client.generate("talker", "x", options={"num_ctx": wrong}),
        lambda wrong: client.generate("talker", options={"num_ctx": wrong}),  # the model is only to be loaded
        lambda wrong: client.generate("talker", options={"num_ctx": wrong}, keep_alive=0),
        lambda wrong: client.chat("talker", [], options={"num_ctx": wrong}, stream=False),
        lambda wrong: client.embed("talker", "x", options={"num_ctx": wrong}),
    )
    for call in calls:
        for wrong, words in (
            (0, "must be a number of tokens above 0"),
            (-1, "must be a number of tokens above 0"),
            (513, "requests of this server have at most 512 tokens"),
            (2**31, "requests of this server have at most 512 tokens"),
            (2**40, "requests of this server have at most 512 tokens"),
        ):
            with pytest.raises(ollama.ResponseError, match=rf"options\.num_ctx = {wrong}: {words}") as error:
                call(wrong)
            assert error.value.status_code == 400
    short = client.embed("talker", prompt, options={"num_ctx": 8})
    assert short.prompt_eval_count == 8  # a text loses its end, as without num_ctx
    reason = r"options\.num_ctx = 8: the input has 2\d tokens or more, and truncate is false. Give at least (2\d)"
    with pytest.raises(ollama.ResponseError, match=reason) as error:
        client.embed("talker", prompt, truncate=False, options={"num_ctx": 8})
    enough = int(re.search(reason, str(error.value))[1])
    assert client.embed("talker", prompt, truncate=False, options={"num_ctx": enough}).prompt_eval_count == enough


def test_a_format_constrains_the_answer(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for format in ("json", schema):
        answer = client.chat("talker", HI, format=format, options={"num_predict": 40})
        assert answer.message.content.lstrip()[:1] == "{"


@pytest.mark.long
def test_a_call_of_a_tool_is_an_object(talker):
    with serving(talker, script=CALL) as server, ollama.Client(server.url, trust_env=False) as client:
        template = {"tools": [WEATHER]}
        answer = server.post("/api/chat", {"model": "talker", "messages": HI, "stream": False, **template})
        if answer.status_code == 400:  # a template without a place for tools
            assert "tools" in answer.json()["error"]
        else:
            (call,) = client.chat("talker", HI, **template).message.tool_calls
            assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})


def test_a_history_with_calls_results_and_thinking_is_read():
    messages = [
        {"role": "user", "content": "?", "images": [b64encode(b"x").decode()]},
        {"role": "assistant", "thinking": "hm", "content": "", "tool_calls": [
            {"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {}}},
        ]},
        {"role": "tool", "tool_name": "b", "content": "2"},
        {"role": "tool", "content": "1"},
    ]  # fmt: skip
    chat = parse_chat({"model": "m", "messages": messages, "think": "low", "keep_alive": "1h30m"})
    first, second, b, a = chat.chat.messages
    assert first["content"][0]["image_url"]["url"] == "data:;base64,eA=="
    assert (second["reasoning_content"], second["tool_calls"][0]["function"]) == (
        "hm",
        {"name": "a", "arguments": {"x": 1}},
    )
    ids = [call["id"] for call in second["tool_calls"]]
    assert ([b["tool_call_id"], b["name"]], [a["tool_call_id"], a["name"]]) == ([ids[1], "b"], [ids[0], "a"])
    assert (chat.keep_alive, chat.chat.chat["reasoning_effort"], chat.stream) == (5400.0, "low", True)


def test_options_are_the_parameters_of_sampling_under_their_names():
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.2,
               "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 3, "num_predict": 9, "stop": "x"}  # fmt: skip
    params = parse_generate({"model": "m", "prompt": "x", "options": options}).chat.params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.max_tokens) == (0.5, 7, 1.2, 9)
    assert (params.min_p, params.typical_p, params.seed, params.stop) == (0.1, 0.9, 3, "x")
    plain = parse_generate({"model": "m", "prompt": "x"}).chat.params
    assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens) == (0.8, 40, 0.9, None)
    suggested = parse_generate({"model": "m", "prompt": "x"}, suggested={"top_k": 5}).chat.params
    assert (suggested.top_k, suggested.temperature) == (5, 0.8)


@pytest.mark.parametrize(
    ("parse", "body", "words"),
    [
        (parse_generate, {"prompt": "x", "template": "{{ .Prompt }}"}, "template = .*is not supported"),
        (parse_generate, {"prompt": "x", "context": [1, 2]}, "context = .*is not supported"),
        (parse_generate, {"prompt": "x", "raw": True, "system": "s"}, "system = .*is given with raw: true"),
        (parse_generate, {"prompt": "x", "options": {"mirostat": 2}}, r"options.mirostat = 2.*not supported"),
        (parse_generate, {"prompt": "x", "options": {"temprature": 1}}, r"options.temprature.*unknown field"),
        (parse_generate, {"prompt": "x", "options": {"num_gpu": 4}}, r"options.num_gpu = 4"),
        (parse_generate, {"prompt": "x", "options": {"top_p": 3}}, r"options.top_p = 3"),
        (
            parse_generate,
            {"prompt": "x", "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            "repeat_last_n = 64",
        ),
        (parse_generate, {"prompt": "x", "keep_alive": "soon"}, "keep_alive = 'soon'"),
        (parse_chat, {"messages": [{"role": "robot"}]}, r"messages\[0\].role"),
        (parse_chat, {"messages": HI, "format": "yaml"}, "format = 'yaml'"),
        (parse_chat, {"messages": [{**HI[0], "x": 1}]}, r"messages\[0\].x = 1.*unknown field"),
        (parse_embed, {"input": "x", "options": {"temperature": 1}}, "options.temperature"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_path(parse, body, words):
    with pytest.raises(RequestError, match=words):
        parse({"model": "m", **body})


def test_errors_have_ollamas_form(client, server):
    for call, status in (
        (lambda: client.chat("nobody", HI), 404),
        (lambda: client.chat("talker", HI, options={"num_ctx": 5000}), 400),
        (lambda: client.generate("talker", keep_alive=0), 400),
        (lambda: client.pull("smollm2"), 400),
        (lambda: client.delete("talker"), 400),
        (lambda: client.embed("nobody", "x"), 404),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            call()
        assert error.value.status_code == status
        assert set(json.loads(str(error.value.error)) if error.value.error.startswith("{") else {"error": 1}) == {
            "error"
        }
    assert server.get("/api/none").status_code == 404


def test_embeddings_are_those_of_openais_route(client, server):
    expected = server.post("/v1/embeddings", {"input": ["a", "bc"]}).json()["data"]
    found = client.embed("talker", ["a", "bc"])
    for vector, one in zip(found.embeddings, expected, strict=True):
        assert list(vector) == pytest.approx(one["embedding"], abs=1e-5)
    assert found.prompt_eval_count == 3
    assert list(client.embeddings("talker", "a").embedding) == pytest.approx(expected[0]["embedding"], abs=1e-5)
    assert len(client.embed("talker", "x" * 900, dimensions=4).embeddings[0]) == 4  # it is cut, as there
    with pytest.raises(ollama.ResponseError, match="512"):
        client.embed("talker", "x" * 900, truncate=False)
    assert list(client.embed("talker", []).embeddings) == []


def test_a_server_of_one_model_lists_and_describes_it(client, server):
    (listed,) = client.list().models
    assert listed.model == "talker"
    (running,) = client.ps().models
    assert (running.name, running.context_length) == ("talker", 512)
    assert running.expires_at > datetime.now(UTC) + timedelta(days=365)
    assert server.get("/api/version").json() == {"version": __version__}
    assert client.generate("talker", "").done_reason == "load"


@pytest.fixture(scope="module")
def several(talker):
    options = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 64}
    served = [ServedModel(model=str(talker), names=(name,), options=options) for name in ("a", "b")]
    with serving_several(served, load_on_demand=True) as found:
        yield found


@pytest.fixture(scope="module")
def of_several(several):
    with ollama.Client(several.url, trust_env=False) as found:
        yield found


@pytest.mark.long
def test_models_are_loaded_described_and_unloaded_as_requests_ask(several, of_several, talker):
    client = of_several
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {"a", "b"}
    assert listed["a"].size == sum(file.stat().st_size for file in talker.iterdir())
    assert client.ps().models == []
    shown = client.show("a")
    assert (shown.details.format, shown.details.family, shown.capabilities) == (
        "safetensors", "llama", ["completion", "tools"],
    )  # fmt: skip
    assert shown.modelinfo["llama.context_length"] == 1 << 17
    assert "<|assistant|>" in shown.template
    assert client.ps().models == []
    assert client.generate("a", "", keep_alive="10m").done_reason == "load"
    (running,) = client.ps().models
    assert timedelta(minutes=9) < running.expires_at - datetime.now(UTC) < timedelta(minutes=11)
    assert running.size > 1 << 18
    assert client.chat("b", HI, options={"num_predict": 2}, keep_alive=0).message.content
    assert client.generate("a", keep_alive=0).done_reason == "unload"
    for _ in range(200):
        if several.states == {"a": "unloaded", "b": "unloaded"}:
            break
    assert several.states == {"a": "unloaded", "b": "unloaded"}


def test_a_pinned_model_stays_though_a_prompt_asks_that_it_goes(client):
    assert client.chat("talker", HI, keep_alive=0).message.content == SCRIPT
    assert client.chat("talker", HI).message.content == SCRIPT


def test_a_time_beyond_all_dates_is_shown_as_the_last_one(several, of_several):
    for keep_alive in ("99999999h", 1e300, f"{'9' * 400}h"):
        body = {"model": "a", "keep_alive": keep_alive, "stream": False}
        assert several.post("/api/generate", body).json()["done_reason"] == "load"
        (running,) = of_several.ps().models
        assert running.expires_at - datetime.now(UTC) > timedelta(days=36_000)
    assert of_several.generate("a", keep_alive=0).done_reason == "unload"


def test_a_time_limit_is_read_with_a_prompt_and_without(server):
    for path, body in (("/api/generate", {}), ("/api/generate", {"prompt": "x"}), ("/api/chat", {"messages": HI})):
        whole = {"model": "talker", "stream": False, **body}
        assert server.post(path, {**whole, "timeout": 20}).status_code == 200
        refused = server.post(path, {**whole, "timeout": 0})
        assert (refused.status_code, "timeout = 0" in refused.json()["error"]) == (400, True)


def test_a_pulled_model_is_served_and_a_deleted_one_is_not(several, of_several, monkeypatch):
    client, calls = of_several, []
    monkeypatch.setattr("foreword.server.ollama_routes.PULL_SECONDS", 0.01)

    def pull(name, progress):
        calls.append(registry.known_model(name).name)
        progress(3, 10)

    monkeypatch.setattr(registry, "pull", pull)
    monkeypatch.setattr(registry, "remove", lambda name: calls.append(f"-{name}"))
    lines = list(client.pull("smollm2", stream=True))
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    assert client.pull("qwen2.5-coder:0.5b").status == "success"
    assert calls == ["smollm2", "qwen2.5-coder-0.5b"]
    assert {"smollm2", "qwen2.5-coder:0.5b"} <= set(several.states)
    assert client.delete("smollm2").status == "success"
    assert calls[-1] == "-smollm2"
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat("smollm2", HI)
    with pytest.raises(ollama.ResponseError, match="only models known by name"):  # files of others stay
        client.delete("a")
    assert "a" in several.states
    lines = several.post("/api/pull", {"model": "no-such-model"}).text.splitlines()
    assert "unknown model 'no-such-model'" in json.loads(lines[-1])["error"]


def test_only_the_admin_key_pulls_and_deletes(talker):
    with serving(talker, api_key=("one",), admin_key="root") as server:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            for key, status in (("one", 401), ("root", 400)):
                with server.client(headers={"Authorization": f"Bearer {key}"}) as http:
                    assert http.request(method, path, json={"model": "x"}).status_code == status


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("library/Llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("llama3.2:1b-instruct-q8_0", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0"),
        ("llama3.2:1b-instruct-fp16", "bartowski/Llama-3.2-1B-Instruct-GGUF:F16"),
        ("hf.co/org/model-GGUF:Q4_0", "org/model-GGUF:Q4_0"),
        ("qwen2.5-coder:0.5b", "qwen2.5-coder-0.5b"),
        ("qwen2.5-coder:0.5b-q8_0", None),
        ("llama3.2:9b", None),
        ("nobody", None),
    ],
)
def test_names_of_ollama_stand_for_models(name, found):
    assert from_ollama(name) == found


def test_every_name_of_the_library_is_an_id_of_the_hub_or_a_known_model():
    for sizes in LIBRARY.values():
        for model in sizes.values():
            assert model in registry.KNOWN or (model.count("/") == 1 and ":" in model)


def test_a_model_is_found_by_its_name_in_ollamas_library(monkeypatch, talker):
    monkeypatch.setattr("foreword.models.hub.from_hub", lambda name: talker)
    assert find_model("llama3.2:1b") == (talker, talker.name)
