"""`foreword explain` prints the worked example of the documents from real steps."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.batch.proof.spec import TENSORS, Level
from foreword.cli.app import app
from foreword.errors import ConfigError
from foreword.insight.conform import run as conform
from foreword.insight.token_text import shown_text
from foreword.insight.toy import given_step, toy_steps
from foreword.insight.worked import EXAMPLES as DOCUMENTS
from foreword.insight.worked import agrees, value_here

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "worked_examples.json").read_text())["cases"]


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, ["explain", *args], catch_exceptions=False, env={"COLUMNS": "80"})
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
        (("--computed", "1,2"), "Invalid value for --computed: give --scheduled too"),
        (("--computed", "1,2", "--scheduled", "1"), "Invalid value for --computed: has 2 numbers, and --scheduled 1"),
        (("--scheduled", "1,2", "--steps", "2"), "Invalid value for --steps: it does nothing with --scheduled"),
        (("--scheduled", "9", "--max-model-len", "8"), "a request has 9 tokens; raise it to that"),
        (("--scheduled", "1", "--budget", "8"), "Invalid value for --budget: it does nothing with --scheduled"),
        (("--example", "nano-vllm", "--prompts", "3"), "Invalid value for --prompts: it does nothing with --example"),
        (("--example", "vllm"), "Invalid value for '--example'"),
        (("--null-block", "1"), "Invalid value for '--null-block'"),
        (("a text",), "Invalid value for TEXT: give --model too"),
        (("--model", "smollm2"), "Invalid value for --model: give prompts as TEXT"),
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


@pytest.mark.one_in(4)
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
    expected = [
        token for i, j in zip([-1, *numbers], numbers, strict=False) for token in ["…"] * (j > i + 1) + [str(j)]
    ]
    assert tokens == expected
    assert len(tokens) == 30 or len(tokens) >= (columns - 34) // 6 - len(lengths)


# -- the worked examples of the documents, with their numbers typed in here ------------------------------------------


def steps_of(*arguments: str) -> list[dict]:
    """The tensors of each step; those of the one KV group as they are, not as a list of one."""
    steps = [json.loads(line) for line in invoke(*arguments, "--json").splitlines()]
    of_groups = {spec.name for spec in TENSORS if spec.per_group or spec.attribute == "explain"}
    return [{name: value[0] if name in of_groups else value for name, value in step.items()} for step in steps]


def case(name: str) -> dict:
    return next(case for case in EXAMPLES if case["name"] == name)


@pytest.mark.parametrize(
    ("document", "cases"),
    [
        ("vllm-ascend", ["three-requests/step-1-prefill", "three-requests/step-2-decode-and-chunk"]),
        ("model-runner", ["five-requests/200-tokens"]),
        ("nano-vllm", ["two-requests/varlen-prefill-block-256", "two-requests/decode-block-256"]),
    ],
)
def test_every_figure_of_a_document_comes_out(document, cases):
    steps = steps_of("--example", document)
    for step, name in zip(steps, cases, strict=False):
        for tensor, expected in case(name)["expected"].items():
            if tensor == "input_ids" or tensor not in step:
                continue  # ids are made up in each document
            if tensor in ("token_indices", "block_table_indices") and document == "nano-vllm":
                continue  # the document has no max_model_len
            assert step[tensor] == expected, (name, tensor)
        blocks = [[b for b in row if b != (-1 if document == "nano-vllm" else 0)] for row in step["block_table"]]
        assert blocks == case(name)["block_table"]


def test_the_notes_on_process_reqs_come_out_with_the_indices_that_they_lack():
    step = steps_of("--example", "vllm-ascend")[2]
    assert step["req_indices"] == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    assert step["positions"] == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert step["block_table_indices"] == [0, 0, 3, 3, 4, 4, 5, 6, 6, 7]


def test_the_block_tables_of_nano_vllm_are_one_padded_tensor():
    padded = steps_of("--example", "nano-vllm")[2]["block_table"]
    assert [row[:5] for row in padded] == [[10, 25, 3, -1, -1], [101, 78, 5, 9, 11]]


DIFFERENT = {
    ("vllm-ascend", "Input IDs"), ("vllm-ascend", "token_indices"), ("vllm-ascend", "token_indices // block_size"),
    ("model-runner", "query_start_loc_np"),
}  # fmt: skip
"""The figures that the documents have wrong."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_figure_agrees_with_the_step_or_its_difference_has_a_reason(document):
    different = set()
    for run in DOCUMENTS[document].runs:
        steps = 0
        for batch, figures in zip(run.steps(None), run.figures, strict=True):
            steps += 1
            for figure in figures:
                assert figure.here or figure.note
                if figure.here and not agrees(figure.text, value_here(batch, figure.here)):
                    assert figure.note
                    different.add((document, figure.label))
        assert steps == len(run.figures)
    assert different == {found for found in DIFFERENT if found[0] == document}


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("[1, 2]", "1 2", True),
        ("[1, 2]", "1 2 3", False),
        ("[1, …, 3]", "1 2 3", True),
        ("[1, …, 3]", "1 2 4", False),
        ("[1, …, 5, 6, …, 9]", "1 5 5 6 9", True),
        ("[1, …, 5, 6, …, 9]", "1 5 6 5 8", False),
        ("[1, …, 5, 6, …, 9]", "1 5 7 9", False),
        ("[1, …, 1]", "1", False),
    ],
)
def test_a_figure_with_numbers_left_out_agrees_with_those_around_them(text, values, expected):
    assert agrees(text, values.split()) is expected


def test_an_example_shows_the_figures_of_the_document_and_its_mistakes():
    text = invoke("--example", "model-runner")
    assert "≠ query_start_loc" in text
    assert "here [0, 1, 2, 95, 170, 200]" in text
    assert max(map(len, text.splitlines())) <= 80


# -- given progress, blocks from 0, texts, changes, the legend -------------------------------------------------------


def test_a_step_of_given_progress_has_the_slots_of_its_definition():
    (step,) = steps_of("--computed", "5,0,3", "--scheduled", "1,4,2", "--block-size", "2")
    blocks = [[1, 2, 3], [4, 5], [6, 7, 8]]
    expected = [
        blocks[r][p // 2] * 2 + p % 2 for r, (c, n) in enumerate([(5, 1), (0, 4), (3, 2)]) for p in range(c, c + n)
    ]
    assert step["slot_mapping"] == expected
    assert step["num_computed_tokens"] == [5, 0, 3]


def test_blocks_that_are_numbered_from_zero_are_smaller_by_one_in_every_step():
    arguments = ["--prompts", "3,2,8", "--steps", "12"]
    ones, zeros = steps_of(*arguments), steps_of(*arguments, "--null-block", "-1")
    assert len(ones) == len(zeros) > 8
    for one, zero in zip(ones, zeros, strict=True):
        assert [slot - 2 for slot in one["slot_mapping"]] == zero["slot_mapping"]
        assert [[b - 1 for b in row] for row in one["block_table"]] == zero["block_table"]
        assert one["input_ids"] == zero["input_ids"]


@pytest.mark.parametrize("null_block", [0, -1])
def test_recorded_steps_are_those_of_the_definition(null_block, tmp_path):
    file, sizes = tmp_path / "steps.jsonl", {"block_size": 2, "max_model_len": 12, "null_block": null_block}
    assert len(list(toy_steps([3, 2, 8], budget=10, steps=20, record=file, **sizes))) > 8
    report = conform(file)
    assert (report.differences, report.damage) == ((), None)
    assert report.num_steps > 8
    assert len(list(given_step([1, 4], [5, 0], record=file, **sizes))) == 1
    report = conform(file)
    assert (report.num_steps, report.differences, report.damage) == (1, (), None)


@pytest.mark.parametrize(
    "arguments",
    [("--scheduled", "1,4"), ("--example", "nano-vllm"), ("--example", "vllm-ascend"), ("--null-block", "-1")],
)
def test_the_page_of_any_steps_is_written(arguments, tmp_path):
    page = tmp_path / "page.html"
    assert f"{page}: {1 if arguments[0] == '--scheduled' else 2} steps" in invoke(*arguments, "--html", str(page))
    assert page.read_text().startswith("<!doctype html>")


def test_ids_tell_request_and_position_also_in_long_requests():
    (step,) = steps_of("--scheduled", "150,120,1")
    assert step["input_ids"] == [*range(10000, 10150), *range(11000, 11120), 12000]


def test_the_changes_name_what_was_sampled_and_each_new_block():
    text = invoke("--steps", "2")
    assert text.count("Changed since step") == 1
    assert "request 0: 3 more computed, 3 in all; sampled 1003; no new block" in text
    assert "request 1: 2 more computed, 2 in all; sampled 1102; new block 7" in text
    assert "request 2: 5 more computed, 5 in all; nothing sampled; new block 8" in text
    assert "has left its row" in invoke("--prompts", "9,1", "--steps", "12", "--budget", "4")


def test_the_legend_has_each_tensor_of_the_tables_as_the_specification_has_it():
    text = " ".join(invoke("--steps", "1").split())
    shown = {
        line.split()[0] for line in invoke("--no-legend", "--steps", "1").splitlines() if re.match(r"  [a-z]+_", line)
    }
    for spec in TENSORS:
        if spec.name in shown and spec.level is not Level.SYSTEM:
            assert f" {spec.name} {' '.join(spec.definition.split())} → {spec.consumers}" in text
    assert "What the rows are" not in invoke("--no-legend")


def test_texts_of_the_tokens_stand_above_them(talker):
    text = invoke("--model", str(talker), "ab cd", "xyz", "--no-legend", "--steps", "1")
    row = next(line for line in text.splitlines() if line.startswith("  text "))
    assert row.split()[1:] == ["a", "b", "▁", "c", "d", "x", "y", "z"] or "…" in row
    assert "a|b|▁|c|d" in text or "…" not in row


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b" capital", "▁capital"), (b"\n", "\\n"), ("é".encode()[:1], "<C3>"), (b"a\x1b[31m", "a\\x1b[31m"),
        (b"x" * 30, "x" * 23 + "…"), ("東京".encode(), "東京"), (b"", ""),
    ],
)  # fmt: skip
def test_a_token_is_shown_on_one_line(data, text):
    assert shown_text(data) == text
