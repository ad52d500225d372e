"""Every block of Python and of shell of every page is valid, and those marked `<!-- run -->` run.

`tests/cli/test_commands.py` parses the lines of `foreword` in shell blocks. A mark stands on the line before its block:
`<!-- run -->`, or `<!-- run with the default model -->`. The marked Python blocks of a page run one after the other, in
one scope; of a marked shell block each line is a command of `foreword` that succeeds.
"""

import ast
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
MARK = re.compile(
    r"(?:<!-- run(?P<model> with the default model)? -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M
)


class Block(NamedTuple):
    """A block of code of a page: its language, whether it is marked, and whether it needs the model."""

    language: str
    code: str
    is_marked: bool
    needs_model: bool


@cache
def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    found = MARK.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["language"], m["code"], m[0].startswith("<!--"), m["model"] is not None) for m in found]


def name(page: Path) -> str:
    """Return the path of a page for the list of tests."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=name)
def test_python_of_a_page_compiles(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in {"sh", "bash"} for b in blocks(p))], ids=name)
def test_shell_of_a_page_is_valid(page):
    code = "".join(block.code for block in blocks(page) if block.language in {"sh", "bash"})
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def run_blocks(page: Path, run_here) -> None:
    """Run the marked blocks of a page in their order."""
    scope: dict[str, object] = {}
    for block in blocks(page):
        if block.is_marked and block.language == "python":
            exec(compile(block.code, str(page), "exec"), scope)
        elif block.is_marked:
            for line in block.code.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                status, shown, error = run_here(*arguments)
                assert (program, status, error) == ("foreword", 0, ""), line
                assert shown, line


def marked(needs_model: bool) -> list[Path]:
    """Return the pages with marked blocks, those with one that needs the model or the others."""
    found = {page: [block for block in blocks(page) if block.is_marked] for page in PAGES}
    return [page for page, some in found.items() if some and any(b.needs_model for b in some) is needs_model]


@pytest.mark.parametrize("page", marked(needs_model=False), ids=name)
def test_marked_blocks_of_a_page_run(page, run_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, run_here)


@pytest.mark.one_in(5)
@pytest.mark.model
@pytest.mark.parametrize("page", marked(needs_model=True), ids=name)
def test_marked_blocks_of_a_page_run_with_the_model(page, run_here, tmp_path, monkeypatch, smollm2_path):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, run_here)


def test_pages_have_marked_blocks():
    assert len(marked(needs_model=False)) + len(marked(needs_model=True)) >= 4
