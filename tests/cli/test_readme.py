"""Every block of code of the README runs, and the page that shows a step has real output of the program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import MAIN, PATIENCE, SOURCE

from foreword.insight.toy import toy_steps

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
COMMANDS = [line.partition(" #")[0].strip() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


def blocks(kind: str) -> list[str]:
    return [block for language, block in BLOCKS if language == kind]


def test_every_block_is_of_a_kind_that_a_test_runs():
    assert README.count("```") == 2 * len(BLOCKS)
    assert {language for language, _ in BLOCKS} == {"sh", "python", "console"}


def test_the_readme_has_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_the_step_of_the_page_is_real_output():
    page = (ROOT / "docs" / "one-step.md").read_text()
    steps = [str(b.explain()) for b in toy_steps([3, 2, 8], budget=10, block_size=2, max_model_len=12, steps=2)]
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.S | re.M)
    assert [block.rstrip() for block in shown] == [steps[1].rstrip()]


def test_the_library_example_runs():
    code = next(block for block in blocks("python") if "RequestStates(" in block)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["states"].num_tokens[0] == 4


@pytest.mark.model
def test_the_python_blocks_run_one_after_the_other(smollm2_path, capsys):
    scope: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), scope)
    assert capsys.readouterr().out.endswith("The capital of France is Paris.\n")


@pytest.mark.model
@pytest.mark.parametrize("command", [c for c in COMMANDS if "foreword" in c])
def test_a_command_of_the_readme_succeeds(command, smollm2_path, tmp_path):
    program = tmp_path / "foreword"
    program.write_text(f"#!{sys.executable}\n{MAIN}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if "foreword" not in c])
def test_other_commands_are_targets_of_make(command):
    target = re.fullmatch("make ([a-z]+)", command)
    assert target
    assert re.search(f"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_a_link_of_the_readme_leads_to_a_file(path):
    assert (ROOT / path).exists()
