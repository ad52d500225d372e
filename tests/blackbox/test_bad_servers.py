"""The words of `foreword fuzz` about servers that cannot be reached, refuse, or answer in another form."""

import json
import time
from http.server import BaseHTTPRequestHandler

import pytest
from toy_server import Handler, Toy, running, toy_server
from typer.testing import CliRunner

from foreword.blackbox import ServerError, Target
from foreword.blackbox.replay import events
from foreword.cli.app import app

MODELS = {"data": [{"id": "m"}]}
GOOD = {"choices": [{"text": " a", "logprobs": None}], "usage": {"prompt_tokens": 8}}


def answering(data: bytes, status: int = 200, models: bytes = json.dumps(MODELS).encode()) -> type:
    """A handler with one answer to every request but that for the models."""

    class Fixed(Handler):
        def do_GET(self) -> None:
            self.send(models, 200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send(data, status)

        def send(self, data: bytes, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Fixed


class Silent(Handler):
    def do_GET(self) -> None:
        time.sleep(1.0)


class Closing(Handler):
    def do_GET(self) -> None:
        self.connection.close()


class Locked(Handler):
    def do_GET(self) -> None:
        self.answer({"error": {"message": "no valid key"}}, 401)


class Half(Handler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"data": [')


class Dying(Handler):
    """A server that answers 20 requests and then fails."""

    toy = Toy()

    def do_POST(self) -> None:
        if self.toy.num_requests > 20:
            self.answer({"error": "out of memory"}, 500)
        else:
            super().do_POST()


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (Silent, "no answer within 0.3 s"),
        (Closing, "connection failed: "),
        (Locked, "HTTP 401: no valid key"),
        (Half, "connection failed: closed in the middle of an answer"),
        (answering(b"", models=b"<html>"), "answer is not a JSON object: b'<html>'"),
        (answering(b"", models=b'{"data": []}'), "no models: /v1/models lists none; give one with --model"),
        (answering(b'{"error": {"message": "no kernel"}}', 500), "HTTP 500: no kernel"),
        (answering(b"[1, 2"), "answer is not a JSON object: b'[1, 2'"),
        (answering(b'{"choices": []}'), "answer has no choices"),
        (answering(b'{"choices": [{"message": {}}]}'), "answer has another form: KeyError: 'content'"),
        (answering(json.dumps(GOOD).encode()), "usage.prompt_tokens does not grow with the prompt"),
        (Dying, "HTTP 500: out of memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_command_ends_with_status_2_and_says_why(handler: type[BaseHTTPRequestHandler], message: str):
    seconds = "0.3" if handler is Silent else "60"
    with running(handler) as url:
        result = CliRunner().invoke(app, ["fuzz", url, "--timeout", seconds, "--runs", "2", "--concurrency", "4"])
    assert result.exit_code == 2, result.output
    assert f"foreword: {url}: " in result.stderr
    assert message in result.stderr


def test_an_address_where_nothing_listens_is_status_2():
    with running(Handler) as url:
        pass
    result = CliRunner().invoke(app, ["fuzz", url])
    assert (result.exit_code, "connection failed" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["localhost:8000"], "expected an address such as http://127.0.0.1:8000"),
        (["http://localhost/v1/completions"], "has a path. Give the address alone"),
        (["http://localhost", "--block-sizes", "16,x"], "expected integers from 1 to 65536"),
        (["http://localhost", "--scenarios", "agian"], "must be one of again, "),
        (["http://localhost", "--route", "responses"], "must be completions or chat"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["fuzz", *arguments])
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (b'data: {"choices": []}\n\n', "stream ended without [DONE]"),
        (b"data: {broken\n\ndata: [DONE]\n\n", "answer is not a JSON object"),
        (b"Internal error\n\n", "broken stream"),
    ],
)
def test_a_broken_stream_is_a_failure_of_the_server(lines: bytes, kind: str):
    with running(answering(lines)) as url, pytest.raises(ServerError) as raised:
        list(events(Target(url), {}, time.monotonic() + 60))
    assert raised.value.kind == kind


def test_a_finding_is_status_1_with_its_conversation_and_script_and_a_sound_server_0(tmp_path):
    path = tmp_path / "finding.py"
    options = ["--concurrency", "2", "--block-sizes", "16", "--max-words", "120", "--scenarios", "again", "--runs", "3"]
    with toy_server(Toy("border")) as url:
        wrong = CliRunner().invoke(app, ["fuzz", f"{url}/v1/", *options, "-o", str(path)])
    with toy_server(Toy()) as url:
        right = CliRunner().invoke(app, ["fuzz", url, *options])
    assert (wrong.exit_code, right.exit_code) == (1, 0), wrong.output + right.output
    assert "; max_tokens 1, model 'toy'  ← wrong" in wrong.stdout
    assert "request 1 is answered otherwise than alone: token 0: expected" in wrong.stdout
    assert "no fault found" in right.stdout
    assert path.read_text(encoding="utf-8").startswith('"""Hold conversations with a server over HTTP')
