"""Requests in the engine: their end with their connection, the reasons why they wait, abort, failures, metrics."""

import json
import re
import socket
import threading
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import pytest
from server_rig import HI, frames_of, serving

from computing import replace_compute
from foreword.server.client import Client


@pytest.fixture
def server(talker):
    with serving(talker) as running:
        yield running
        running.check_nothing_is_left()


def sent(server, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request was sent, and nothing read."""
    place, data = urlsplit(server.url), json.dumps(body).encode()
    connection = socket.create_connection((place.hostname, place.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_closed_connection_frees_its_blocks_within_a_step(server, path, stream):
    body = {"max_tokens": 3000, "stream": stream, "temperature": 0}
    body |= {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": HI, "n": 2}
    connection = sent(server, body, path)
    server.wait_until(lambda: server.steps > 2)
    with server.held():
        connection.close()
        server.wait_until(lambda: not server.context.admission.num_requests)
        before = server.steps
    server.check_nothing_is_left()
    assert server.steps <= before + 1


IT = {"X-Request-Id": "it"}
LONG = "abc" * 1000
"""A prompt whose body is large enough to be tokenized in a thread."""


def hold_tokenizer(server) -> tuple[threading.Event, threading.Event]:
    """Events: set when LONG begins to be tokenized; to be set for it to go on."""
    inside, may_go_on = threading.Event(), threading.Event()
    encode = server.llm.tokenizer.encode

    def slow(text, *arguments, **options):
        if text == LONG:
            inside.set()
            assert may_go_on.wait(60)
        return encode(text, *arguments, **options)

    server.llm.tokenizer.encode = slow
    return inside, may_go_on


def test_a_connection_that_closes_while_its_prompt_is_tokenized_never_enters_the_engine(server):
    inside, may_go_on = hold_tokenizer(server)
    connection = sent(server, {"prompt": LONG, "max_tokens": 5})
    assert inside.wait(60)
    connection.close()
    server.wait_until(lambda: not server.context.admission.num_requests)
    may_go_on.set()
    server.check_nothing_is_left()
    assert server.steps == 0


def test_a_request_being_tokenized_is_told_as_such(server):
    inside, may_go_on = hold_tokenizer(server)
    answer = server.later("/v1/completions", {"prompt": LONG, "max_tokens": 1}, headers=IT)
    assert inside.wait(60)
    assert server.get("/requests/it/why").json()["state"] == "preparing"
    assert [request["id"] for request in server.get("/requests").json()["data"]] == ["it"]
    may_go_on.set()
    answer.result(60)
    assert server.get("/requests/it/why").status_code == 404


def test_a_request_that_is_aborted_while_it_is_tokenized_ends_without_tokens(server):
    inside, may_go_on = hold_tokenizer(server)
    answer = server.later("/v1/completions", {"prompt": LONG, "max_tokens": 100}, headers=IT)
    assert inside.wait(60)
    assert server.post("/abort", {"request_id": "it"}).json() == {"request_id": "it", "aborted": True}
    may_go_on.set()
    (choice,) = answer.result(60).json()["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("abort", "")


def test_an_id_tells_and_ends_all_prompts_of_its_request(server):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
    answer = server.later("/v1/completions", body, headers=IT)
    server.wait_until(lambda: server.steps > 2)
    found = server.get("/requests/it/why").json()
    assert (found["id"], found["state"]) == ("it", "running")
    assert [(part["id"], part["state"]) for part in found["parts"]] == [("it-0", "running"), ("it-1", "running")]
    assert server.get("/requests/it-1/why").json() == found["parts"][1]
    taken = server.post("/v1/completions", {"prompt": "c"}, headers=IT)
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "X-Request-Id")
    assert server.post("/abort", {"request_id": "it"}).json()["aborted"]
    assert [choice["finish_reason"] for choice in answer.result(60).json()["choices"]] == ["abort"] * 4


@pytest.mark.long
def test_a_long_text_being_tokenized_delays_no_other_request(server):
    inside, may_go_on = hold_tokenizer(server)
    answer = server.later("/v1/completions", {"prompt": LONG, "max_tokens": 1})
    assert inside.wait(60)
    try:
        for path, body in (("/v1/completions", {"prompt": "short"}), ("/v1/chat/completions", {"messages": HI})):
            assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
    finally:
        may_go_on.set()
        answer.result(60)


def test_abort_ends_a_stream_with_what_there_is(server):
    body = {"prompt": "a", "max_tokens": 3000, "stream": True, "temperature": 0}
    answer = server.later("/v1/completions", body, headers=IT)
    server.wait_until(lambda: server.steps > 2)
    assert server.post("/abort", {"request_id": "it"}).json() == {"request_id": "it", "aborted": True}
    assert frames_of(answer.result(60).text)[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.post("/abort", {"request_id": "it"}).status_code == 404


ME, YOU, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("me", "you", "boss"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("admin_key", ["boss", "you", None])
def test_why_a_prompt_was_not_in_the_cache_is_told_and_texts_to_those_who_may_see_them(talker, admin_key):
    with serving(talker, api_key=("me", "you"), admin_key=admin_key) as server:
        secret = {"prompt": "m" * 40 + "secret of another client", "max_tokens": 1}
        assert server.post("/v1/completions", secret, headers=YOU).status_code == 200
        body = {"prompt": "m" * 40 + "mine", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        answer = server.later("/v1/completions", body | options, headers=IT | ME)
        why = lambda headers: server.get("/requests/it/why", headers=headers).json()  # noqa: E731
        server.wait_until(lambda: server.steps > 2 and "cache" in why(ME))
        found = why(ME)["cache"]
        assert (found["reason"], found["position"], found["prompt"]) == ("differs", 40, "mine")
        assert found["reused"] <= 40 < found["prompt_tokens"]
        assert "secret" not in str(found)
        assert why(YOU)["cache"].items() < found.items()
        assert "mine" not in str(why(YOU))
        listed = server.get("/requests", headers=ADMIN if admin_key == "boss" else YOU).json()["data"]
        (cache,) = (one["cache"] for one in listed if one["id"] == "it")
        texts = ("mine", "secret o") if admin_key == "boss" else (None, None)
        assert (cache.get("prompt"), cache.get("cached")) == texts
        server.post("/abort", {"request_id": "it"}, headers=ADMIN if admin_key == "boss" else YOU)
        usage = frames_of(answer.result(60).text)[-1]["usage"]
        assert usage["prompt_tokens_details"]["cache_miss"] == {"reason": "differs", "position": 40}
        server.check_nothing_is_left()


def test_without_keys_the_text_of_a_prompt_is_told_at_the_address_that_sent_it(server):
    answer = server.later("/v1/completions", {"prompt": "mine", "max_tokens": 3000, "ignore_eos": True}, headers=IT)
    server.wait_until(lambda: server.steps > 2 and "cache" in server.get("/requests/it/why").json())
    assert server.get("/requests/it/why").json()["cache"]["prompt"] == "mine"
    here = Client("", "127.0.0.1")
    assert here.is_same(here)
    assert not here.is_same(Client("", "10.0.0.1"))
    server.post("/abort", {"request_id": "it"})
    answer.result(60)


def test_the_reason_why_a_request_waits(talker):
    with serving(talker, engine={"max_num_seqs": 1}) as running:
        connections, running.pace = [], 0.01
        for name in ("one", "two"):
            place, data = urlsplit(running.url), json.dumps({"prompt": "a", "max_tokens": 3000}).encode()
            connections.append(socket.create_connection((place.hostname, place.port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            connections[-1].sendall(head.encode() + data)
            running.wait_until(lambda name=name: name in running.llm.engine)
        running.wait_until(lambda: running.get("/requests/two/why").json()["state"] == "max_num_seqs")
        assert running.get("/requests/one/why").json()["state"] == "running"
        assert {r["id"]: r["state"] for r in running.get("/requests").json()["data"]} == {
            "one": "running",
            "two": "max_num_seqs",
        }
        metrics = running.get("/metrics").text
        assert 'vllm:num_requests_waiting_by_reason{model_name="talker",reason="max_num_seqs"} 1.0' in metrics
        assert 'vllm:num_requests_running{model_name="talker"} 1.0' in metrics
        assert running.get("/requests/none/why").status_code == 404
        for connection in connections:
            connection.close()
        running.check_nothing_is_left()


@pytest.mark.long
def test_many_prompts_of_one_body_leave_rows_to_others(talker):
    with serving(talker, engine={"max_num_seqs": 4}, max_requests=8) as running:
        done: list = []
        prompts = [[97 + i % 20] for i in range(60)]
        alone = [
            running.post("/v1/completions", {"prompt": [p], "max_tokens": 3, "temperature": 0}) for p in prompts[:20]
        ]
        texts = [one.json()["choices"][0]["text"] for one in alone]

        def post() -> None:
            body = {"prompt": prompts, "max_tokens": 3, "temperature": 0}
            done.append(running.post("/v1/completions", body, headers={"X-Request-Id": "many"}).json())

        running.pace = 0.02
        thread = threading.Thread(target=post)
        thread.start()
        running.wait_until(lambda: any(name.startswith("many") for name in running.llm.request_ids))
        most = 0
        for _ in range(5):
            assert running.post("/v1/completions", {"prompt": "b", "max_tokens": 2}).status_code == 200
            most = max(most, sum(name.startswith("many") for name in running.llm.request_ids))
        running.pace = 0
        thread.join()
        assert most <= 2
        choices = sorted(done[0]["choices"], key=lambda choice: choice["index"])
        assert [choice["text"] for choice in choices] == texts * 3
        running.check_nothing_is_left()


def test_a_request_that_waits_is_not_told_for_whose(talker):
    with serving(talker, engine={"max_num_seqs": 1}) as running:
        running.pace = 0.01
        threads = []
        for name in ("one", "two", "three"):
            body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
            post = partial(running.post, "/v1/completions", body, headers={"X-Request-Id": name})
            threads.append(threading.Thread(target=post))
            threads[-1].start()
            running.wait_until(lambda name=name: name in running.llm.request_ids)
        running.wait_until(lambda: "two" in running.get("/requests").text)
        for name in ("two", "three"):
            told = running.get(f"/requests/{name}/why").text
            assert not ({"one", "two", "three"} - {name}) & set(re.findall(r"\w+", told)), told
        for name in ("one", "two", "three"):
            running.post("/abort", {"request_id": name})
        for thread in threads:
            thread.join()


def test_a_failed_step_ends_its_requests_with_an_error_that_the_log_explains_and_the_server_goes_on(server, capfd):
    compute = server.llm.engine.executor.compute

    def broken(batch, logits_indices):
        if server.steps > 3:
            raise RuntimeError(f"the model broke at {list(batch.req_ids)}")
        return compute(batch, logits_indices)

    replace_compute(server.llm.engine.executor, broken)
    body = {"prompt": "a", "max_tokens": 50}
    with server.client() as client:
        text = client.post("/v1/completions", json={**body, "stream": True}, headers={"X-Request-Id": "mine"}).text
    *_, last = [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n") if frame]
    assert last["error"]["type"] == "server_error"
    whole = server.post("/v1/completions", body, headers={"X-Request-Id": "other"})
    assert whole.status_code == 500
    assert last["error"]["message"] == whole.json()["error"]["message"]
    assert "model broke" not in text + whole.text  # its text may name requests of others
    log: list[str] = []  # is written after the answers are sent

    def explains() -> bool:
        log.append(capfd.readouterr().err)
        return all(f"the model broke at ['{name}']" in "".join(log) for name in ("mine", "other"))

    server.wait_until(explains)
    replace_compute(server.llm.engine.executor, compute)
    assert server.post("/v1/completions", body).status_code == 200


def test_a_request_whose_logits_are_not_numbers_fails_alone(server):
    compute = server.llm.engine.executor.compute

    def broken(batch, logits_indices):
        logits = compute(batch, logits_indices)
        logits[:] = np.nan
        return logits

    replace_compute(server.llm.engine.executor, broken)
    response = server.post("/v1/completions", {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


def test_metrics_count_tokens_requests_and_times(talker):
    with serving(talker, engine={"max_num_batched_tokens": 512}) as server:  # a prompt takes several steps
        before = values(server.get("/metrics").text)
        server.post("/v1/completions", {"prompt": "a" * 2000, "max_tokens": 7, "ignore_eos": True})
        server.post("/v1/completions", {"prompt": "a" * 2000, "max_tokens": 5, "ignore_eos": True, "n": 2})
        after = values(server.get("/metrics").text)

    def grown(name: str, label: str = "") -> float:
        found = [key for key in after if key.partition("{")[0] == name and label in key]
        return sum(after[key] - before.get(key, 0) for key in found)

    assert grown("vllm:prompt_tokens_total") == 4000
    assert grown("vllm:generation_tokens_total") == 17
    assert grown("vllm:prefix_cache_hits_total") >= 1984
    assert grown("vllm:request_success_total", 'finished_reason="length"') == 3
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == 14
    assert {after[f'vllm:num_requests_{state}{{model_name="talker"}}'] for state in ("running", "waiting")} == {0}
    assert grown("foreword:http_responses_total", 'status="200"') >= 2


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_texts_become_tokens_and_texts_again(server):
    body = server.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert body == {"count": 3, "max_model_len": 4096, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert server.post("/detokenize", {"tokens": [97, 98, 99]}).json() == {"prompt": "abc", "content": "abc"}
    chat = server.post("/tokenize", {"messages": HI}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<|user|>Hi<|end|><|assistant|>"
    info = server.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"], "m.content" in info["chat_template"]) == ("<|end|>", 260, True)
    assert server.post("/tokenize", {"text": "abc"}).json()["error"]["param"] in ("prompt", "text")
    for token in (-1, info["vocab_size"], 99999999999999999999):
        response = server.post("/detokenize", {"tokens": [97, token]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens[1]")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"", 200),  # as `curl -X POST` sends it
        ({"content-type": "application/json"}, b"{}", 200),
        ({"content-type": "application/json"}, b"", 200),
        ({"origin": "https://elsewhere.com"}, b"", 403),  # a web page, which a browser lets send it without asking
        ({}, b"{}", 415),
    ],
)
def test_a_request_without_fields_needs_no_body_unless_a_web_page_sends_it(server, headers, body, status):
    with server.client() as client:
        assert client.post("/reset_prefix_cache", headers=headers, content=body).status_code == status
        assert client.post("/v1/completions").status_code == 400


def test_the_prefix_cache_can_be_forgotten(server):
    server.post("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1})
    assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
    usage = server.post("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
