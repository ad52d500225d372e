"""The reference pages name what exists, and their proofs prove it. `make proofs` tries every row; here a few."""

import subprocess
import sys
from pathlib import Path

import pytest

from reference.pages import PAGES, defined_tests, rows, subject

TESTS = Path(__file__).parents[1]
ROWS = rows()


def test_every_page_has_rows_and_says_where_the_layer_ends():
    pages = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    index = (PAGES.parent / "reference-systems.md").read_text()
    assert {row.page for row in ROWS} == set(pages)
    assert len(ROWS) > 100
    for name, text in pages.items():
        assert f"(reference/{name})" in index
        assert "\n## Ends here\n" in text
        assert "\n## Not here\n" in text


def test_every_row_has_names_and_a_proof():
    assert not [str(row) for row in ROWS if not (row.theirs and row.ours and row.proofs)]


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in row.ours}))
def test_every_name_of_ours_exists(name):
    subject(name)


def test_every_named_test_exists():
    assert {proof for row in ROWS for proof in row.proofs} <= defined_tests()


def prove(*options: str) -> subprocess.CompletedProcess[str]:
    script = TESTS / "reference" / "prove.py"
    return subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_dozen_corruptions_spread_over_the_pages_are_caught():
    done = prove("--sample", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("12 passed, 0 failed\n")


@pytest.mark.long
def test_a_proof_that_does_not_look_at_its_row_is_reported(tmp_path):
    proof = "test_row_fields::test_a_table_row_holds_what_it_was_started_with_and_what_was_appended"
    table = ["| theirs | ours | how | proof |", "|---|---|---|---|"]
    table += [f"| x | `{name}` | | {proof} |" for name in ("table.num_blocks", "batch.positions", "states.lora_id")]
    (tmp_path / "page.md").write_text("\n".join(table))
    done = prove("--pages", str(tmp_path))
    assert done.returncode == 1
    assert "page.md:4  batch.positions" in done.stdout
    assert "page.md:5  states.lora_id" in done.stdout
    assert "table.num_blocks" not in done.stdout
    assert done.stdout.endswith("1 passed, 2 failed\n")
