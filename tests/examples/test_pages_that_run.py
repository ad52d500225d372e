"""Pages whose code is one program: every block runs, in order, and prints what the page shows after it."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize(
    ("name", "blocks", "shown"), [("write-an-engine.md", 8, 4), ("plugin-authors.md", 2, 1), ("findings.md", 1, 1)]
)
def test_every_block_of_a_page_prints_what_the_page_shows(name, blocks, shown):
    found, scope = BLOCK.findall((DOCS / name).read_text(encoding="utf-8")), {}
    assert (len(found), sum(bool(text) for _, text in found)) == (blocks, shown)
    for code, text in found:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, f"docs/{name}", "exec"), scope)
        assert [line.rstrip() for line in printed.getvalue().splitlines()] == text.splitlines()
