"""Every option of `LLM` is an option, a variable and a line of a file of run, chat, batch and serve."""

import json
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from foreword.cli.app import app
from foreword.cli.options import SETTINGS
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError

ARGUMENTS = {
    "run": ("foreword.cli.run.LLM", ["Hi"]),
    "chat": ("foreword.cli.chat.LLM", []),
    "batch": ("foreword.cli.batch.LLM", ["in.jsonl", "out.jsonl"]),
    "serve": ("foreword.server.run.AsyncLLM", ["--port", "0"]),
}
"""Command → what makes its model, arguments."""

OBJECTS = {"scheduler", "media"}
"""Options that are Python objects; their fields are options of their own."""

ONCE = {"loras": "adapter", "observers": "observer", "logits_processors": "logits_processor", "tiers": "tier"}
"""Option of `LLM` that is a collection → the option that gives one of it."""

VALUES = {
    "adapter": (["law=somewhere"], {"law": "somewhere"}),
    "observer": (["plug:in"], ["plug:in"]),
    "logits_processor": (["plug:in"], ["plug:in"]),
    "tier": (["plug:in"], ["plug:in"]),
    "policy": ("priority", "priority"),
    "device": ("cuda:7", "cuda:7"),
    "kv_cache_bytes": ("3MiB", 3 << 20),
    "seed": (5, 5),
}
"""Option → its value in a file and as `LLM` gets it, where that does not follow from its type."""

NAMES = sorted({ONCE.get(name, name) for name in get_type_hints(LLMOptions)} - OBJECTS)


def value_of(name: str) -> tuple[object, object]:
    """A value that is not the default: as it stands in a file, and as `LLM` gets it."""
    known = SETTINGS[name]
    if name in VALUES:
        return VALUES[name]
    if known.choices:
        found = next(choice for choice in reversed(known.choices) if choice != known.default)
    elif known.type == "bool":
        found = not known.default
    else:
        found = {"int": 7, "float": 1.5, "str": "other"}[known.type]
        found = min(found, known.most) if known.kind.is_number else found
    assert found != known.default
    return found, found


def text_of(value: object) -> str:
    return str(value[0] if isinstance(value, list) else value).lower()


def flag_of(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", text_of(value)]


@pytest.fixture
def options_of(monkeypatch, tmp_path):
    """The model and the options that `LLM` gets from a command with these arguments, variables and lines of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("")

    def call(command, *arguments, variables=None, file=None):
        target, own = ARGUMENTS[command]
        found = []

        def make(model, **options):
            found.append((model, options))
            raise ConfigError("recorded")

        monkeypatch.setattr(target, make)
        if file is not None:
            (tmp_path / "options.toml").write_text(file)
            arguments = ("--config", "options.toml", *arguments)
        result = CliRunner().invoke(app, [command, *own, *arguments], env=variables or {})
        assert str(result.exception) == "recorded", (result.output, result.exception)
        return found[0]

    return call


def test_every_option_is_tried():
    assert len(NAMES) > 40
    assert set(NAMES) == SETTINGS.keys() - {"model"}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_every_option_of_an_llm_reaches_it(options_of, command, source):
    for name in NAMES:
        given, expected = value_of(name)
        if name == "adapter" and command == "serve":
            expected = {"law": "somewhere"}
        if source == "flag":
            _, found = options_of(command, *flag_of(name, given))
        elif source == "variable":
            _, found = options_of(command, variables={f"FOREWORD_{command}_{name}".upper(): text_of(given)})
        else:
            _, found = options_of(command, file=f"{name} = {json.dumps(given)}\n")
        of_llm = next((many for many, one in ONCE.items() if one == name), name)
        assert found.get(of_llm) == expected, name


@pytest.mark.parametrize("command", ARGUMENTS)
def test_the_command_line_goes_before_a_variable_and_a_variable_before_the_file(options_of, command):
    file, variables = 'max_num_seqs = 1\nmodel = "one"\n', {f"FOREWORD_{command}_MAX_NUM_SEQS".upper(): "2"}
    for expected, others in ((1, {}), (2, {"variables": variables})):
        model, options = options_of(command, file=file, **others)
        assert (model, options["max_num_seqs"]) == ("one", expected)
    model, options = options_of(command, "--max-num-seqs", "3", "-m", "two", file=file, variables=variables)
    assert (model, options["max_num_seqs"]) == ("two", 3)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("max_num_seq = 3", "Did you mean 'max_num_seqs'?"),
        ("ctx_size = 3", "'max_model_len' (tokens of one request)"),
        ("max_num_seqs = 'x'", "max_num_seqs='x': expected an integer from 1 to 65536"),
        ("max_num_seqs = true", "max_num_seqs=True: expected an integer from 1 to 65536"),
        ("max_num_seqs = [3]", "max_num_seqs=[3]: expected an integer from 1 to 65536"),
        ("speculation = false", "speculation=False: expected one of 'auto', 'off', 'ngram'"),
        ("num_threads = true", "num_threads=True: expected an integer from 1"),
        ("prefix_caching = 'no'", "prefix_caching='no': expected true or false"),
        ("observer = 'a:b'", "observer='a:b': expected a list"),
        ("model = 3", "model=3: expected a text"),
        ("model = { a = 1 }", "model={'a': 1}: expected a text"),
        ("config = 'other.toml'", "config: unknown setting"),
        ("a", "options.toml"),
    ],
)
@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_line_that_cannot_be_used_is_refused_with_its_name(tmp_path, monkeypatch, command, line, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.toml").write_text(line)
    result = CliRunner().invoke(app, [command, *ARGUMENTS[command][1], "--config", "options.toml"])
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--gpu-memory-utilization", "'--kv-cache-bytes' (a number of bytes, not a share)"),
        ("--ctx-size", "'--max-model-len' (tokens of one request)"),
        ("-ngl", "-ngl. A model is on one device"),
        ("-c", "'--max-model-len'"),
        ("-np", "'--max-num-seqs'"),
        ("--num-ctx", "'--max-model-len'"),
        ("--threads", "'--num-threads'"),
        ("--budget", "'--max-num-batched-tokens'"),
        ("--no-enable-prefix-caching", "'--prefix-caching'"),
        ("--no-prefix-cachin", "Did you mean '--no-prefix-caching'?"),
        ("--qqqq", "--help` lists the options."),
    ],
)
@pytest.mark.parametrize("words", ["run", "serve", "batch", "bench latency"])
def test_an_option_of_another_system_is_answered_with_the_one_here(words, given, answer):
    result = CliRunner().invoke(app, [*words.split(), given, "4"])
    assert result.exit_code == 2
    assert answer in result.output


def test_the_model_is_an_argument_or_an_option_of_serve(options_of):
    assert options_of("serve", "one")[0] == "one"
    assert options_of("serve", "--model", "one")[0] == "one"
    assert options_of("serve", "one", variables={"FOREWORD_SERVE_MODEL": "two"})[0] == "one"
    result = CliRunner().invoke(app, ["serve", "one", "-m", "two"])
    assert (result.exit_code, "give one" in result.output) == (2, True)


def test_parts_that_a_text_names_take_part_in_a_run(talker, tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(
        "from foreword.engine import EngineObserver\n"
        "steps, keys = [], []\n"
        "class Counter(EngineObserver):\n"
        "    def step_committed(self, plan, batch, sampled):\n"
        "        steps.append(batch.num_tokens)\n"
        "def newest_first(request):\n"
        "    keys.append(request)\n"
        "    return (0,)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import own_parts

    arguments = ["run", "Hi", "-m", str(talker), "--max-tokens", "3", "--no-async-scheduling"]
    named = ["--observer", "own_parts:Counter", "--policy", "own_parts:newest_first"]
    result = CliRunner().invoke(app, [*arguments, *named])
    assert result.exit_code == 0, result.output
    assert len(own_parts.steps) == 3
    assert own_parts.keys


@pytest.mark.parametrize("words", ["run", "serve", "simulate", "bench latency", "explain"])
def test_help_has_every_name_in_full_in_a_narrow_window(words):
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "60"}).output
    assert "…" not in shown.replace("[TEXT…]", "")
    expected = set(SETTINGS) - {"adapter"} if words in ("run", "serve", "bench latency") else {"block_size"}
    shown_names = set(shown.replace("/", " ").split())
    assert {f"--{name.replace('_', '-')}" for name in expected} <= shown_names
