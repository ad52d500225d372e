"""The tables of docs/models.md follow from the registry, the families and their keys."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    page = (ROOT / "docs" / "models.md").read_text()
    assert runpy.run_path(str(ROOT / "tools" / "models_page.py"))["written"](page) == page, "run tools/models_page.py"
