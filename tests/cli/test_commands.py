"""The list of subcommands, which is shown without importing them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from foreword.cli.app import COMMANDS, app


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


def test_the_list_is_shown_without_numpy():
    code = (
        "import sys; from foreword.cli.app import app; app(['--help'], standalone_mode=False); "
        "sys.exit('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_answered_with_the_nearest():
    result = CliRunner().invoke(app, ["explian"])
    assert result.exit_code == 2
    assert "Did you mean 'explain'?" in result.output
