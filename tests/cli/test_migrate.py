"""`foreword migrate` keeps what has a counterpart, and names the rest."""

import json

import pytest
from typer.testing import CliRunner

from foreword.cli.app import app


def migrated(*words, text=None):
    done = CliRunner().invoke(app, ["migrate", *words, "--json"], input=text, catch_exceptions=False)
    result = json.loads(done.stdout)
    return done.exit_code, result["command"], {row["given"]: row for row in result["options"]}


def test_options_of_vllm_become_those_of_serve():
    status, command, rows = migrated(
        "vllm",
        "vllm serve org/model --max-num-seqs 64 --no-enable-prefix-caching --port=8001 --dtype bfloat16 --api-key k",
    )
    assert status == 0
    assert command[:3] == ["foreword", "serve", "org/model"]
    assert " ".join(command[3:]) == "--max-num-seqs 64 --no-prefix-caching --port 8001 --dtype bf16 --api-key k"
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("option", "remark"),
    [
        ("--gpu-memory-utilization 0.9", "Give --kv-cache-bytes, a number of bytes, not a share."),
        ("--temperature 0.5", "A parameter of each request: temperature."),
        ("--nonsense 3", "Nothing here corresponds to it."),
        ("--max-num-seqz 3", "Did you mean '--max-num-seqs'?"),
        ("--port 99999", "port=99999: must be from 0 to 65535"),
        ("--tool-call-parser hermes", "--message-format"),
    ],
)
def test_what_has_no_counterpart_is_left_out_with_the_reason(option, remark):
    status, command, rows = migrated("vllm", f"org/model {option} --max-model-len 32")
    assert status == 1
    assert command == ["foreword", "serve", "org/model", "--max-model-len", "32"]
    assert remark in rows[option]["remark"]


def test_short_options_of_llama_cpp_are_known():
    _, command, rows = migrated("llama.cpp", "llama-server -m model.gguf -c 8192 -np 4 -ngl 99 -fa -t 8")
    assert " ".join(command) == "foreword serve model.gguf --max-model-len 8192 --max-num-seqs 4 --num-threads 8"
    assert "one device" in rows["-ngl 99"]["remark"]
    assert "leave it out" in rows["-fa"]["remark"]


def test_a_modelfile_gives_the_model_its_settings_and_what_belongs_to_requests():
    text = '# mine\nFROM org/model\nPARAMETER num_ctx 4096\nPARAMETER stop "a b"\nSYSTEM """Be\nkind."""\n'
    status, command, rows = migrated("ollama", "-", text=text)
    assert status == 1
    assert command == ["foreword", "serve", "org/model", "--max-model-len", "4096"]
    assert rows["stop a b"]["remark"] == "A parameter of each request: stop."
    assert "role system" in rows["system Be\\nkind."]["remark"]


def test_a_modelfile_that_is_not_there_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["migrate", "ollama", str(tmp_path / "none")])
    assert "cannot be read as a Modelfile" in str(done.exception)


def test_an_open_quote_is_refused():
    done = CliRunner().invoke(app, ["migrate", "vllm", "vllm serve 'a b"])
    assert "Close its quotes" in str(done.exception)


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [("llama.cpp", "llama-server -m"), ("vllm", "python3 -m vllm.entrypoints.openai.api_server --model")],
)
def test_a_model_without_a_name_is_left_out_with_the_reason(engine, arguments):
    status, command, rows = migrated(engine, arguments)
    assert (status, command) == (1, ["foreword", "serve"])
    assert "needs a value" in rows[arguments.split()[-1]]["remark"]


def test_a_modelfile_without_the_name_of_its_model_is_not_served_as_one_without_a_name():
    status, command, _ = migrated("ollama", "-", text="FROM\n")
    assert (status, command) == (1, ["foreword", "serve"])
