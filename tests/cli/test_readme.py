"""The README shows real output of the program, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

from foreword.insight.toy import toy_steps

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_step_in_the_readme_is_real_output():
    steps = [str(b.explain()) for b in toy_steps([3, 2, 8], budget=10, block_size=2, max_model_len=12, steps=2)]
    assert steps[1] in README


def test_the_library_example_runs():
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "RequestStates(" in block)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["states"].num_tokens[0] == 4
