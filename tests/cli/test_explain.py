"""`foreword explain` prints the worked example of the documents from real steps."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.cli.app import app
from foreword.errors import ConfigError

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, ["explain", *args], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.smoke
def test_the_default_is_the_documents_worked_example():
    steps = [json.loads(line) for line in invoke("--json").splitlines()]
    assert len(steps) == 2
    for step, case in zip(steps, EXAMPLES[:2], strict=True):
        for name, expected in case["expected"].items():
            got = step[name]
            assert (got[0] if isinstance(got, list) and got and isinstance(got[0], list) else got) == expected, name
        assert step["attention_state"] == case["attention_state"]
        assert [[b for b in row if b] for row in step["block_table"][0]] == case["block_table"]


def test_the_tables_show_every_derived_tensor():
    text = invoke("--steps", "1")
    for name in ("token_indices", "block_table_indices", "block_numbers", "block_offsets", "slot_mapping", "mask"):
        assert name in text


def test_a_token_is_explained_in_a_sentence():
    assert "prompt token 2 of request '2'" in invoke("--token", "7", "--steps", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--token", "-1"), "Invalid value for '--token'"),
        (("--token", "99"), "Invalid value for --token: 99: the steps have tokens 0 to 9"),
        (("--token", "1", "--json"), "Invalid value for --token: cannot be combined with --json"),
        (("--steps", "0"), "Invalid value for '--steps'"),
    ],
)
def test_impossible_options_are_refused(arguments, message):
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("prompts", ["", "a,b", "0", "12"])
def test_impossible_prompts_are_refused_with_the_fix(prompts):
    with pytest.raises(ConfigError):
        CliRunner().invoke(app, ["explain", "--prompts", prompts], catch_exceptions=False)


@pytest.mark.parametrize("columns", [64, 80, 120, 178])
@pytest.mark.parametrize(
    "options",
    [
        "--steps 1 --prompts 20,10 --budget 30 --max-model-len 40",
        "--steps 3 --prompts 90,60,3,2,1,1,1,1,1,1,1,1,1,1 --budget 100 --max-model-len 100000",
        "--steps 4 --prompts 3,2,8",
        "--steps 2 --prompts 20000 --budget 20000 --max-model-len 100000",
        "--token 3",
    ],
)
def test_no_line_is_longer_than_the_terminal_and_none_loses_its_label(columns, options):
    result = CliRunner().invoke(app, ["explain", *options.split()], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(len(line) for line in lines if columns >= 80 or line.startswith("  ") or "--token" in options) <= columns
    if "--token" not in options:
        labels = {"token t", "block_table_indices", "num_scheduled_tokens", "slot_mapping"}
        assert labels <= {line.strip()[: len(label)] for line in lines for label in labels}


def test_values_that_are_left_out_are_counted():
    arguments = ["explain", "--steps", "1", "--prompts", "30", "--budget", "30", "--max-model-len", "40"]
    for columns in (64, 80, 100, 150, 250):
        output = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}).output
        (positions,) = [line.split()[2:] for line in output.splitlines() if line.startswith("  positions")]
        if "…" in positions:
            at = positions.index("…")
            assert positions[:at] == list(map(str, range(at)))
            assert positions[at:] == ["…", str(29 - at), "more", "…", "29"]
        else:
            assert positions == list(map(str, range(30)))
            assert columns == 250
