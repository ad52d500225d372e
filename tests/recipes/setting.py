"""A setting: a number in each class of settings that is not of an executor."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword import LLM
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.server.config import ServerConfig
from recipes.recipe import Edit, Recipe, field_of

TEST = "tests/server/test_dummy_setting.py"


def edit(path: str, owner: str, name: str) -> Edit:
    line = f'    {name}: int = setting(3, "A number of the {name}.", least=1, most=9, value_name="N")\n'
    return Edit(path, field_of(owner, line), TEST)


RECIPE = Recipe(
    heading="A setting",
    test=TEST,
    edits=(
        edit("src/foreword/engine/config.py", "EngineConfig", "dummy_engine"),
        edit("src/foreword/scheduler/config.py", "SchedulerConfig", "dummy_scheduler"),
        edit("src/foreword/engine/speculation/config.py", "SpeculationConfig", "dummy"),
        edit("src/foreword/server/config.py", "ServerConfig", "dummy_server"),
    ),
    proofs=(
        "tests/cli/test_options.py::test_every_option_is_tried",
        "tests/cli/test_options.py::test_every_option_of_an_llm_reaches_it",
        "tests/server/test_process.py::test_every_setting_of_a_server_is_an_option_a_variable_and_a_line_of_a_file",
    ),
    not_followed={"src/foreword/executors/options.py": "the recipe of an executor adds an option"},
)
OF_ENGINE = {
    "dummy_engine": lambda config: config.dummy_engine,
    "dummy_scheduler": lambda config: config.scheduler.dummy_scheduler,
    "speculation_dummy": lambda config: config.speculation.dummy,
}
"""Option → where an engine's configuration has it."""


@pytest.mark.parametrize("name", OF_ENGINE)
def test_an_engine_takes_the_setting_and_refuses_it_out_of_range(talker, name):
    with LLM(str(talker), speculation="ngram", **{name: 9}) as llm:
        assert OF_ENGINE[name](llm.engine.config) == 9
    with pytest.raises(ConfigError, match=rf"{name}=10: must be from 1 to 9"):
        LLM(str(talker), speculation="ngram", **{name: 10})


def test_a_server_takes_the_setting_and_refuses_it_out_of_range():
    assert ServerConfig(dummy_server=9).dummy_server == 9
    with pytest.raises(ConfigError, match="dummy_server=10: must be from 1 to 9"):
        ServerConfig(dummy_server=10)


@pytest.mark.parametrize("name", [*OF_ENGINE, "dummy_server"])
def test_the_setting_is_in_the_help_of_the_server_and_on_the_page(name):
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert f"--{name.replace('_', '-')}" in shown
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert f"| `{name}` | integer, 1 to 9 | `3` | A number of the " in page
