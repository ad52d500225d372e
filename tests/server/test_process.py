"""`foreword serve` as a process: options, files and variables; start, drain and end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from processes import MAIN, start
from server_rig import frames_of
from typer.testing import CliRunner

from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.server.config import ServerConfig
from foreword.settings import settings_of

READY = re.compile(rb"foreword: (\S+) at (http://\S+)")


def started(
    *arguments: object, env: dict[str, str] | None = None, program: str = MAIN
) -> tuple[subprocess.Popen, str, str]:
    """A server that is ready, the name of its model and its address."""
    process = start("serve", *arguments, env=env or {}, program=program)
    line = process.stderr.readline()
    found = READY.match(line)
    assert found, line + process.stderr.read()
    return process, found[1].decode(), found[2].decode()


def ended(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGTERM)
    with process:
        return process.wait(60)


def test_it_serves_until_sigterm_and_ends_with_status_0(talker):
    process, name, url = started(talker, "--port", 0, "--served-model-name", "tiny", "--max-model-len", 512)
    assert name == "tiny"
    (model,) = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    assert ended(process) == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"API_KEY": ""}, "FOREWORD_SERVE_API_KEY: is empty"),
        ({"ADMIN_KEY": ""}, "FOREWORD_SERVE_ADMIN_KEY: is empty"),
        ({"CORS_ORIGIN": ""}, "FOREWORD_SERVE_CORS_ORIGIN: is empty"),
        ({"API_KEY": "   "}, "api_key: a key begins or ends with a space"),
        ({"API_KEY": "k\n"}, "FOREWORD_SERVE_API_KEY: .*none of them empty"),
        ({"ADMIN_KEY": "a\x01"}, "admin_key: .*cannot be printed"),
        ({"REQUIRE_KEY": "on"}, "api_key: is missing, and require_key asks for one"),
        ({"REQUIRE_KEY": "on", "API_KEY": ""}, "FOREWORD_SERVE_API_KEY: is empty"),
    ],
)
def test_a_key_that_is_none_opens_no_server(variables, words):
    env = {f"FOREWORD_SERVE_{name}": text for name, text in variables.items()}
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["serve", "none.gguf"], env=env, catch_exceptions=False)


def test_a_key_of_a_variable_is_one_whatever_spaces_it_has(talker):
    keys = {"FOREWORD_SERVE_API_KEY": "correct horse battery staple\nsecond key", "FOREWORD_SERVE_REQUIRE_KEY": "on"}
    process, _, url = started(talker, "--port", 0, env=keys)
    for key, status in (("correct horse battery staple", 200), ("second key", 200), ("correct", 401), ("second", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/v1/models", headers=headers, trust_env=False, timeout=60).status_code == status
    assert ended(process) == 0


def test_a_thread_that_is_stuck_does_not_keep_the_process(talker, tmp_path):
    given = "--port", 0, "--adapter-directory", tmp_path, "--drain-timeout", 0.1
    # Reading an adapter never ends, and the time that the process has after the last request is 10 s else.
    stuck = "loras.Loras.read = lambda *_: (print('stuck', file=sys.stderr, flush=True), time.sleep(1e6))"
    imports = "import sys, time; from foreword.engine import loras; from foreword.server import listener"
    process, _, url = started(talker, *given, program=f"{imports}; listener.GRACE = 0.5; {stuck}; {MAIN}")
    body = {"lora_name": "x", "lora_path": "endless"}
    with ThreadPoolExecutor(1) as pool, process:
        answer = pool.submit(httpx.post, f"{url}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False)
        assert process.stderr.readline() == b"stuck\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        assert isinstance(answer.exception(60), httpx.HTTPError)
        assert b"did not end in time; the process ends without them" in process.stderr.read()


def test_sigterm_lets_requests_in_progress_end_and_takes_no_new_ones(talker):
    process, _, url = started(talker, "--port", 0)
    texts: list[str] = []
    got_first = threading.Event()

    def read() -> None:
        body = {"prompt": "a", "max_tokens": 2000, "stream": True, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, trust_env=False) as response:
            for part in response.iter_text():
                texts.append(part)
                got_first.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert got_first.wait(60)
    assert ended(process) == 0
    thread.join()
    frames = frames_of("".join(texts))
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False, timeout=60)


@pytest.mark.long
def test_what_does_not_end_in_time_is_ended_with_an_error(talker):
    process, _, url = started(talker, "--port", 0, "--drain-timeout", "1", "--max-model-len", 100000)
    body = {"prompt": "a", "max_tokens": 90000, "stream": True, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, trust_env=False) as response:
        parts = response.iter_text()
        text = next(parts)
        process.send_signal(signal.SIGTERM)
        text += "".join(parts)
    assert '"code":"stopped"' in text.splitlines()[-2]
    with process:
        assert process.wait(60) == 0


def test_an_address_in_use_is_told_before_the_model_is_loaded(tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, start("serve", "none.gguf", "--port", taken.getsockname()[1], cwd=tmp_path) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"in use" in error
    assert error.count(b"\n") == 1


def test_a_file_a_variable_and_an_option_are_one_table(tmp_path, talker):
    file = tmp_path / "serve.toml"
    file.write_text(f'model = "{talker}"\nport = 0\nserved_model_name = ["file"]\nmax_model_len = 300\n')
    env = {"FOREWORD_SERVE_MAX_MODEL_LEN": "400", "FOREWORD_SERVE_SERVED_MODEL_NAME": "variable"}
    process, name, url = started("--config", file, "--served-model-name", "option", env=env)
    try:
        assert name == "option"
        assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"][0]["max_model_len"] == 400
    finally:
        assert ended(process) == 0


@pytest.fixture
def settings_of_serve(monkeypatch, tmp_path):
    """Return the settings that `foreword serve` gets from these lines of a file, arguments and variables."""

    def call(text: str = "", *arguments: str, **variables: str) -> ServerConfig:
        found = []
        monkeypatch.setattr("foreword.server.run.run", lambda model, config, **options: found.append(config))
        several = lambda models, config, options: found.append(config)  # noqa: E731
        monkeypatch.setattr("foreword.server.run_several.run_several", several)
        (tmp_path / "serve.toml").write_text(text)
        result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.toml"), *arguments], env=variables)
        if result.exception is not None:
            raise result.exception
        return found[0]

    return call


def test_every_setting_of_a_server_is_an_option_a_variable_and_a_line_of_a_file(settings_of_serve, tmp_path):
    (tmp_path / "one.gguf").touch()
    own = {"replicas": 1, "tls_certificate": None, "tls_key": None}  # options of a cluster; only together
    valid = {"cors_origin": ["https://a.b"], "media_host": ["a.b:80"], "key_limit": ["k share=2"], "pin": ["smollm2"],
             "models_dir": str(tmp_path)}  # fmt: skip
    for name, known in settings_of(ServerConfig).items():
        if name in own:
            continue
        value = valid.get(name) or (
            not known.default if known.type == "bool"
            else max(min(300, known.most), known.least) if known.kind.is_number
            else ["a=b"] if known.kind.collect else known.choices[0] if known.choices else "ab"
        )  # fmt: skip
        # They go with it.
        others = ("--kv-events", "tcp://*:5557") if name.startswith("kv_events_") else ()
        others = ("--api-key", "k") if name in ("require_key", "key_limit") else others
        is_off = value is False
        flag, text = (
            f"--{'no-' * is_off}{name.replace('_', '-')}",
            value[0] if known.kind.collect else str(value).lower(),
        )
        expected = tuple(value) if known.kind.collect else value
        for given in (
            settings_of_serve(f"{name} = {json.dumps(value)}", *others),
            settings_of_serve("", *([flag] if known.type == "bool" else [flag, text]), *others),
            settings_of_serve("", *others, **{f"FOREWORD_SERVE_{name.upper()}": text}),
        ):
            assert getattr(given, name) == expected, name
    assert settings_of_serve("", "--tls-certificate", "a", "--tls-key", "b").tls_key == "b"
    assert settings_of_serve("max_requests = 3", "--max-requests", "4").max_requests == 4
    assert settings_of_serve("max_body_bytes = '2MiB'").max_body_bytes == 2 << 20


@pytest.mark.long
def test_the_log_tells_who_may_use_the_server_and_how_it_ends(talker):
    process, _, url = started(talker, "--port", 0, "--host", "0.0.0.0", "--drain-timeout", 0.1)
    assert b"every machine that reaches it may use the model" in process.stderr.readline()
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120, trust_env=False) as response:
        parts = response.iter_raw()
        next(parts)
        process.send_signal(signal.SIGTERM)
        list(parts)
    log = process.communicate(timeout=60)[1].decode()
    assert "foreword: got SIGTERM; the port is closed; 1 request in progress: they may end within 1 s\n" in log
    assert "foreword: the server ended; 1 request in progress: cut, since the time is over\n" in log
    assert process.returncode == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options", [("--host", "127.0.0.1"), ("--host", "localhost"), ("--host", "0.0.0.0", "--api-key", "x")]
)
def test_a_server_that_only_some_can_use_warns_of_nothing(talker, options):
    process, _, _ = started(talker, "--port", 0, *options)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=60)[1].decode()
    assert log == (
        "foreword: got SIGTERM; the port is closed; no request is in progress\n"
        "foreword: the server ended; no request is in progress\n"
    )


@pytest.mark.long
def test_without_the_extra_the_command_names_it():
    code = "import sys; sys.modules['uvicorn'] = None; from foreword.cli import main; sys.argv = ['', 'serve']; main()"
    source = str(Path(sys.modules["foreword"].__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": source},
        timeout=60,
        check=False,
    )
    assert (done.returncode, b"foreword[serve]" in done.stderr) == (2, True)
