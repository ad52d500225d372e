"""The example of docs/shadow.md finds what the page prints."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "shadow.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    shown = re.search(r"```\n(step 1: .*?)```", PAGE, re.DOTALL)[1]
    assert shown in capsys.readouterr().out
