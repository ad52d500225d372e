"""The list of subcommands, which is shown without importing them."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from processes import SOURCE, run
from typer.testing import CliRunner

from foreword import __version__
from foreword.cli.app import COMMANDS, app
from foreword.cli.chat import COMMANDS as CHAT_COMMANDS
from foreword.cli.examples import EXAMPLES
from foreword.names import OTHERS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_shows_the_first_line_of_each_commands_help(name):
    command = getattr(import_module(f"foreword.cli.{name}"), name)
    text = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    assert text.splitlines()[0] == COMMANDS[name]


@pytest.mark.parametrize("arguments", [[name] for name in COMMANDS] + [["bench", "host"], ["models", "pull"]])
def test_every_command_shows_its_help_and_its_full_name(arguments):
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    assert f"{' '.join(arguments)} [OPTIONS]" in result.output


def commands(root):
    """Words of a command → its Click command, of every command and group."""
    found = {"": root}
    for name in COMMANDS:
        context = root.commands[name].make_context(name, [], resilient_parsing=True)
        found[name] = context.command
        found |= {f"{name} {word}": part for word, part in getattr(context.command, "commands", {}).items()}
    return found


FOREWORD = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def folder_of_examples(tmp_path, monkeypatch):
    """A folder with the files that examples name, which are read before other options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.toml").write_text("")


def parse(line: str) -> str:
    """The words of the command in a line of a shell, whose options are all understood."""
    program, *rest = shlex.split(line.rpartition(" | ")[2].partition(" < ")[0].partition(" > ")[0])
    assert program == "foreword"
    context, command, words = FOREWORD.make_context("foreword", list(rest)), FOREWORD, []
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        command, words = context.command, [*words, name]
        rest = [*context._protected_args, *context.args]
    assert not rest, line
    return " ".join(words)


def test_every_command_has_examples_and_every_example_is_a_command():
    assert set(EXAMPLES) == set(commands(FOREWORD))
    for words, lines in EXAMPLES.items():
        for line in lines:
            assert parse(line).startswith(words), line


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines(page: Path) -> list[str]:
    """The lines that begin `foreword` with a command, or end in one after a pipe, in the shell blocks of a page."""
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```$", page.read_text(), re.S | re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition(" #")[0].removeprefix("$ ").strip() for line in lines]
    return [line for line in found if re.match(r"foreword [a-z-]|[^|`]* \| foreword ", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.stem)
def test_every_command_line_of_a_page_is_a_command(page):
    assert all(parse(line) for line in command_lines(page))


def test_pages_have_lines_of_every_command_that_users_begin_with():
    found = {parse(line).split()[0] for page in PAGES for line in command_lines(page)}
    assert found >= {"run", "chat", "batch", "serve", "explain", "simulate", "bench"}


TEXTS = [*PAGES, ROOT / "examples" / "README.md"]
ELSEWHERE = {
    "--cpus", "--enable-cache-report", "--enable-prompt-tokens-details", "--gguf", "--models-max", "--num-tokens",
    "--remapped", "--text",
}  # fmt: skip
"""Flags in texts that are of other programs."""


def in_text(page: Path, pattern: str) -> list[str]:
    """Yield what matches in the code inside of sentences and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    return [match[1] for match in map(re.compile(pattern).fullmatch, re.findall(r"`([^`]+)`", text)) if match]


@pytest.fixture(scope="module")
def flags():
    """Words of a command → its flags."""
    return {
        words: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
        for words, command in commands(FOREWORD).items()
    }


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_flags_and_targets_in_sentences_exist(page, flags):
    for text in in_text(page, r"(?:\.venv/bin/)?foreword ([a-z].*)"):
        first, *rest = text.partition(" | ")[0].split()
        words = f"{first} {rest[0]}" if rest and f"{first} {rest[0]}" in flags else first
        assert words in flags, text
        assert {word.partition("=")[0] for word in rest if word.startswith("-") and word != "-"} <= flags[words], text
    every = set().union(*flags.values())
    of_others = {f"--{name.replace('_', '-')}" for name in OTHERS}
    assert set(in_text(page, r"(--[a-z][a-z-]+)\b.*")) <= every | ELSEWHERE | of_others
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(in_text(page, r"make ([a-z-]+)\b.*")) <= targets


def test_the_page_has_every_command_of_the_chat():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"`/([a-z]+)", page)) >= {*CHAT_COMMANDS, "exit"}


@pytest.mark.parametrize("words", sorted(commands(FOREWORD)))
def test_help_has_values_as_defaults_and_no_text_that_is_cut(words):
    command = commands(FOREWORD)[words]
    shown = " ".join(CliRunner().invoke(app, [*words.split(), "--help"]).output.split())
    names = [
        "",
        *(one.name for one in command.params if one.secondary_opts),
    ]  # Typer shows a flag's name as its default
    assert [name for name in names if f"[default: {name}]" in shown] == []
    assert "..." not in shown.partition(" Commands: ")[2]


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_help_ends_with_the_examples_within_80_columns(words):
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "80"}).output
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    lines = [line.strip() for line in lines if line]
    assert lines[lines.index("Examples:") + 1 :] == list(EXAMPLES[words])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("foreword r", "run"),
        ("foreword run --temp", "--temperature"),
        ("foreword run -m smol", "smollm2"),
        ("foreword bench h", "host"),
    ],
)
def test_a_shell_completes_commands_options_and_models(run_here, monkeypatch, shell, typed, expected):
    environment = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_FOREWORD_COMPLETE": f"complete_{shell}",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, shown, error = run_here()
    assert (status, error) == (0, "")
    found = shown.removeprefix("_arguments '*: :((").lstrip('"')
    assert re.match(r"[\w-]+", found)[0] == expected


@pytest.mark.parametrize("columns", [80, 40])
def test_the_list_is_shown_in_full_in_any_window(columns):
    code, shown, error = run("--help", env={"COLUMNS": str(columns)})
    assert (code, error) == (0, "")
    words = " ".join(shown.split())
    assert all(f"{name} {line}" in words for name, line in COMMANDS.items())


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "foreword", "--version"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"foreword {__version__}\n", "")


def test_an_unknown_command_is_answered_with_the_nearest():
    result = CliRunner().invoke(app, ["explian"])
    assert result.exit_code == 2
    assert "Did you mean 'explain'" in result.output
