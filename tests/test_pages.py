"""Files that are made from tables are those that their generators make."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = runpy.run_path(str(ROOT / "tools" / "pages.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_file_is_up_to_date(name):
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name](), "run: python tools/pages.py"
