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


def shown_row(name: str, *arguments: str, columns: int) -> list[str]:
    output = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": str(columns)}).output
    return next(line.split() for line in output.splitlines() if line.startswith(f"  {name} "))


def test_values_that_are_left_out_are_counted():
    arguments = ["--steps", "1", "--prompts", ",".join("1" * 30), "--budget", "30", "--max-model-len", "40"]
    for columns in (64, 80, 100, 150, 250):
        lens = shown_row("seq_lens", *arguments, columns=columns)[1:]
        if "…" in lens:
            at = lens.index("…")
            assert lens == [*"1" * at, "…", str(29 - at), "more", "…", "1"]
        else:
            assert lens == list("1" * 30)
            assert columns == 250


@pytest.mark.parametrize("prompts", ["30", "12,1,17", "1,1,28", "2,9,19"])
@pytest.mark.parametrize("columns", [80, 100, 150, 250])
def test_tokens_that_fit_are_shown_and_always_the_first_and_the_last_of_each_request(prompts, columns):
    arguments = ["--steps", "1", "--prompts", prompts, "--budget", "30", "--max-model-len", "40"]
    tokens = shown_row("token", *arguments, columns=columns)[2:]
    lengths = list(map(int, prompts.split(",")))
    ends = {e for r in range(len(lengths)) for e in (sum(lengths[:r]), sum(lengths[: r + 1]) - 1)}
    if len(ends) + sum(n > 2 for n in lengths) > (columns - 34) // 6:  # gaps included
        assert tokens[-1] == "29"
        return
    numbers = [int(t) for t in tokens if t != "…"]
    assert set(numbers) >= ends
    assert numbers == sorted(set(numbers))
    expected = [token for i, j in zip([-1, *numbers], numbers, strict=False) for token in ["…"] * (j > i + 1) + [str(j)]]
    assert tokens == expected
    assert len(tokens) == 30 or len(tokens) >= (columns - 34) // 6 - len(lengths)
