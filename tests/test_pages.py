"""Files that are made from tables are those that their generators make."""

import pytest

from docpages import PAGES, ROOT, written


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_file_is_up_to_date(name):
    assert (ROOT / name).read_text(encoding="utf-8") == written(name), "run `make pages`"
