"""The words of commands: errors without names of the library, notes, tables and help in any window."""

from __future__ import annotations

import json
import os
import re

import pytest
import typer
from processes import run
from typer.testing import CliRunner

from foreword.batch.values.sampling_params import PARAMETERS
from foreword.cli.app import COMMANDS, app
from foreword.cli.options import SETTINGS
from foreword.cli.sampling_options import FIELDS
from foreword.cli.wording import of_command
from foreword.errors import ConfigError, RequestError
from foreword.machine import VARIABLE, num_processors
from foreword.models import registry
from foreword.server.config import ServerConfig
from foreword.settings import settings_of

LEAKS = re.compile(r"prompts\[|prompt_token_ids|SamplingParams|PoolingParams|\bNone\b|Error\(|<function|Traceback")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "hello", "--max-model-len", "4"],
            "the prompt of 8 tokens leaves no room for an output: max_model_len is 4. Shorten the prompt to 3 tokens",
        ),
        (["run", "hello", "--max-tokens", "0"], "max_tokens = 0: must be ≥ 1. Use 1 or more, or leave it out"),
        (["run", "hello", "--logprobs", "1000"], "logprobs = 1000: the vocabulary has 260 tokens. Use −1 for all."),
        (["run", "hello", "--logit-bias", "99999=1"], "logit_bias = 99999: expected a token id in [0, 260)"),
        (["run", "hello", "--n", "100000"], "n = 100000: is above 16384"),
        (["run", "hello", "--extra-args", "a=1"], "extra_args = 'a': no logits processor reads it"),
        (["run", "hello", "--json-schema", '{"type": "foo"}'], '--json-schema \'{"type": "foo"}\': cannot be compiled'),
        (["run", "hello", "--kv-cache-bytes", "x"], 'expected an integer from 1 to 2^50, or a size such as "2GiB"'),
        (["run", "hello", "--device", "cuda"], "give executor 'torch' or 'transformers' or 'device', or leave it out"),
        (["run", "hello", "--steps", "3"], "does nothing without --explain"),
        (["embed", "a", ""], "text 2: the prompt is empty"),
        (["embed", "a", "b", "--dimensions", "99"], "text 1: dimensions = 99: the model has 16"),
        (["chat", "--load", "list.json"], "list.json: messages[0] = 1: is not an object"),
        (["batch", "no.jsonl", "-"], "no.jsonl"),
        (["batch", "list.json", "-", "--replicas", "3"], "does nothing without --ray"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_in_the_words_of_the_command_line(run_here, talker, tmp_path, arguments, message):
    (tmp_path / "list.json").write_text("[1]")
    code, out, error = run_here(*arguments, "-m", talker)
    assert (code, out) == (2, "")
    assert message in " ".join(error.split())
    assert not LEAKS.search(error), error


def test_no_advice_about_a_parameter_or_setting_names_none():
    for row in PARAMETERS:
        if row.name in FIELDS and row.fix:
            error = RequestError("prompts[0]", row.name, 0, "must be other", row.fix)
            assert not LEAKS.search(of_command(error)), row.fix
    for known in (*SETTINGS.values(), *settings_of(ServerConfig).values()):
        assert not LEAKS.search(of_command(ConfigError(known.expected))), known.name


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (
            {"FOREWORD_SERVE_PROT": "1"},
            "serve",
            "FOREWORD_SERVE_PROT: no such option. Did you mean 'FOREWORD_SERVE_PORT'?",
        ),
        ({"FOREWORD_SERV_PORT": "1"}, "explain", "no such variable. Did you mean 'FOREWORD_SERVE_PORT'?"),
        ({"FOREWORD_RNU_MODEL": "1"}, "explain", "no such variable. Did you mean 'FOREWORD_RUN_MODEL'?"),
        ({"FOREWORD_NUM_THREAD": "1"}, "models list", "no such variable. Here it is 'FOREWORD_NUM_THREADS'."),
        ({"FOREWORD_XY": "1"}, "explain", "Those of a command begin with its name"),
        ({"FOREWORD_BENCH_HOST_STEP": "1"}, "bench host", "Did you mean 'FOREWORD_BENCH_HOST_STEPS'?"),
        ({"FOREWORD_MODELS_LIST_JSN": "1"}, "models list", "Did you mean 'FOREWORD_MODELS_LIST_JSON'?"),
        ({"FOREWORD_RUN_CTX_SIZE": "1"}, "run hi", "Here it is 'FOREWORD_RUN_MAX_MODEL_LEN'"),
        ({"FOREWORD_EXPLAIN_BUDGET": "x"}, "explain", "FOREWORD_EXPLAIN_BUDGET: budget='x': expected an integer"),
        ({"FOREWORD_SERVE_PORT": "x"}, "serve", "FOREWORD_SERVE_PORT: port='x': expected an integer"),
        ({VARIABLE: "two"}, "run hi", "FOREWORD_NUM_THREADS = 'two': must be a number of threads from 1 to 1024"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused_by_its_name(monkeypatch, variables, arguments, message):
    result = CliRunner().invoke(app, arguments.split(), env=variables)
    assert message in str(result.exception)
    assert next(iter(variables)) in str(result.exception)


@pytest.mark.parametrize(
    "variables",
    [
        {"FOREWORD_SERVICE_HOST": "10.0.0.1", "FOREWORD_SERVICE_PORT": "80", "FOREWORD_SERVICE_PORT_HTTP": "80"},
        {
            "FOREWORD_PORT": "tcp://10.0.0.1:80",
            "FOREWORD_PORT_80_TCP_ADDR": "10.0.0.1",
            "FOREWORD_API_SERVICE_HOST": "a",
        },
        {"FOREWORD_SERVE_PORT": "3", "FOREWORD_RUN_NONSENSE": "x", "OTHER_FOREWORD_X": "1"},  # variables of others
    ],
)
def test_variables_of_other_commands_and_of_services_are_let_be(variables):
    assert CliRunner().invoke(app, ["explain"], env=variables).exit_code == 0


def test_a_value_of_a_file_is_refused_with_the_name_of_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("max_num_seqs = 'a'")
    (tmp_path / "b.toml").write_text("x = = 3")
    (tmp_path / "c.toml").write_bytes(b"\x80")
    (tmp_path / "d.toml").write_text("x = " + "[" * 10_000)
    (tmp_path / "e.toml").write_text("x = " + "9" * 5000)
    parts = ".".join(["a"] * 100_000)
    (tmp_path / "f.toml").write_text(f"\n[{parts}]\n" + "".join(f"b{i} = 1\n" for i in range(100_000)))
    (tmp_path / "g.toml").write_text("x = {" + " . ".join(["'a b'"] * 33) + " = 1}")
    (tmp_path / "i.toml").write_text(".".join([r'"\""'] * 33) + " = 1")
    (tmp_path / "h.toml").write_text("model = '" + ".".join(["a"] * 32) + "/" + "b" * 1_000_000 + "'\nx = 1")
    many = ".".join(["a"] * 40)
    lines = ("z = 1", f"# {many} = 1", f'a = "{many} = 1"', f"b = '{many}' # '", f'c = """\n{many} = 1\n\\"""', '"""')
    (tmp_path / "j.toml").write_text("\n".join(lines))
    (tmp_path / "k.toml").write_text(f"x = '''\n{many} = 1\n'''\n{many} = 1")
    (tmp_path / "l.toml").write_text("record_token_ids = 'secret'")
    (tmp_path / "m.toml").write_text("token = 'secret'")
    for name, message in (
        ("a", "a.toml: max_num_seqs='a': expected an integer from 1 to 65536"),
        ("b", "b.toml: not valid TOML (Invalid value (at line 1, column 5))"),
        ("c", "c.toml: not valid TOML (not UTF-8 at byte 0)"),
        ("d", "d.toml: not valid TOML (the values nest too deeply)"),
        ("e", "to increase the limit)"),
        ("f", "f.toml: not valid TOML (a key of more than 32 parts at line 2)"),
        ("g", "g.toml: not valid TOML (a key of more than 32 parts at line 1)"),
        ("j", "j.toml: z: unknown setting. `foreword run --help` lists the names."),
        ("k", "k.toml: not valid TOML (a key of more than 32 parts at line 4)"),
        ("l", "l.toml: record_token_ids='secret': must be one of 'plain', 'hashed', 'omitted'."),
        ("m", "m.toml: token: unknown setting. Did you mean 'min_tokens'?"),
        ("i", "i.toml: not valid TOML (a key of more than 32 parts at line 1)"),
        ("h", "h.toml: x: unknown setting. `foreword run --help` lists the names."),
    ):
        result = CliRunner().invoke(app, ["run", "hi", "--config", str(tmp_path / f"{name}.toml")])
        assert str(result.exception).endswith(message)


def test_more_threads_than_processors_are_reported(run_here, talker):
    usable = num_processors()
    for options, environment, given in (
        (("--num-threads", usable + 1), {}, f"--num-threads {usable + 1}"),
        ((), {VARIABLE: str(usable + 2)}, f"{VARIABLE}={usable + 2}"),
        (("--num-threads", usable), {}, None),
        ((), {}, None),
    ):
        code, _, error = run_here("run", "Hi", "-m", talker, "--max-tokens", 2, *options, env=environment)
        assert code == 0
        assert error == ("" if given is None else
                         f"{given}: this process may use {usable} processors, and threads wait for each other; "
                         "give at most that\n")  # fmt: skip


def test_a_prompt_that_is_continued_is_reported_unless_that_was_asked_for(run_here, talker, tmp_path):
    os.symlink(talker / "model.safetensors", tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        os.symlink(talker / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    common = ("run", "Hi", "-m", tmp_path, "--max-tokens", 2)
    code, out, error = run_here(*common)
    assert (code, len(out)) == (0, 3)
    assert error == f"model {str(tmp_path)!r:.80} has no chat template: the prompt is continued, as with --raw\n"
    assert run_here(*common, "--raw") == (0, out, "")
    assert run_here(*common, "--quiet") == (0, out, "")
    code, _, error = run_here("chat", "-m", tmp_path)
    assert code == 2
    assert "has no chat template. Use `foreword run --raw`" in error


WORDS = (
    [[name] for name in COMMANDS]
    + [["models", name] for name in ("list", "pull", "rm", "info")]
    + [["bench", name] for name in ("host", "throughput", "latency", "prefill", "startup")]
)


@pytest.mark.parametrize("columns", [40, 64, 80])
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_help_shows_every_option_in_full_in_any_window(words, columns):
    command = typer.main.get_command(app)
    context = command.make_context("foreword", list(words), resilient_parsing=True)
    for word in words:
        command = command.get_command(context, word)
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
        command = context.command
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns)}).output
    assert not re.search(r"<\w", shown)
    assert "…" not in re.sub(r"TEXT…|\[TEXT…\]\.\.\.", "", shown)
    for option in command.params:
        for flag in (*option.opts, *option.secondary_opts):
            assert not flag.startswith("-") or re.search(rf"(?<![\w-]){flag}(?![\w-])", shown), flag


@pytest.mark.one_in(2)
@pytest.mark.parametrize("columns", [None, 64, 80])
def test_names_are_never_cut_and_pipes_get_whole_lines(tmp_path, columns):
    environment = {"FOREWORD_HOME": str(tmp_path)} | ({} if columns is None else {"COLUMNS": str(columns)})
    code, shown, _ = run("models", "list", env=environment)
    assert code == 0
    lines = shown.splitlines()
    assert {line.split()[0] for line in lines[1:] if not line.startswith(" ")} == registry.KNOWN.keys()
    if columns is None:
        assert len(lines) == 1 + len(registry.KNOWN)
        assert all(line == line.rstrip() for line in lines)
        assert any(line.endswith("often wrong") for line in lines)


def test_the_facts_of_a_model_are_whole_lines_in_a_pipe(talker, tmp_path):
    model = tmp_path / ("long" * 40) / "talker"
    model.parent.mkdir()
    model.symlink_to(talker)
    _, shown, _ = run("models", "info", model)
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    assert facts["path"] == str(model)
    assert facts.keys() == json.loads(run("models", "info", model, "--json")[1]).keys()
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("models rm ./x.gguf", "only models known by name are removed: delete a file yourself"),
        ("models rm org/model", "only models known by name are removed"),
        ("run hi -m phi9:1b", "a hub id such as org/model-GGUF:Q4_K_M; of Ollama's names, only some are known"),
        ("run hi -m bytes.gguf", "bytes.gguf: at byte 0, magic: expected b'GGUF', found b'\\x00\\x01\\x02\\x03'"),
        (
            "simulate --trace one.jsonl",
            "one.jsonl, line 1: 'input_length' is missing; docs/simulation.md has the fields",
        ),
        ("simulate --trace two.csv", "two.csv, line 2: 'TIMESTAMP' is missing; docs/simulation.md"),
        ("simulate --trace three.jsonl", "three.jsonl, line 1: "),
        ("serve --media-host http://x", "media_host=['http://x']: give hosts alone"),
        ("serve --api-key=", "api_key: expected a list of strings, none of them empty"),
        ("run hi -m model.safetensors", "model.safetensors: is a part of a model; give the directory, '.'"),
        ("serve --media-host Example.com", "in lower case"),
        ("serve --cors-origin example.com", "give a scheme and a host in lower case, without a path"),
        ("serve --cors-origin https://example.com/", "without a path"),
    ],
)
def test_a_mistake_is_answered_with_what_helps(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("bytes.gguf", "model.safetensors"):
        (tmp_path / name).write_bytes(bytes(range(256)))
    (tmp_path / "one.jsonl").write_text('{"timestamp": 0, "output_length": 3}\n')
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "three.jsonl").write_text('{"timestamp": [], "input_length": 1, "output_length": 3}\n')
    result = CliRunner().invoke(app, arguments.split())
    assert message in str(result.exception)
    assert not LEAKS.search(str(result.exception))
