"""The speculation benchmark measures each method on the default model, with equal outputs."""

from pathlib import Path

import pytest
from parts import speculation

from foreword.native import available


@pytest.mark.long
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_every_method_is_measured_on_equal_outputs(talker: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speculation, "PROMPTS", {"echo": ("Repeat this: one two three one two three one two",)})
    results = list(speculation.run(str(talker), kinds=("echo", "W1"), at_once=(1, 2), max_tokens=10, repeats=1))
    assert [(r.kind, r.at_once, r.method) for r in results] == [
        (kind, count, method)
        for kind, count in (("echo", 1), ("echo", 2), ("W1", 1))
        for method in ("off", "default", "ngram", "suffix")
    ]
    assert all(r.ratio == 1 and r.drafts_per_token == 0 for r in results if r.method == "off")
    assert all(r.tok_s > 0 and 0 <= r.acceptance <= 1 for r in results)


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_the_overhead_of_a_step_is_measured_with_all_numbers_of_drafts(talker: Path, monkeypatch: pytest.MonkeyPatch):
    run: set[int] = set()
    line = lambda tokens, seconds, degree: (run.update(tokens.tolist()), (2.0, 36.0))[1]  # noqa: E731
    monkeypatch.setattr(speculation.np, "polyfit", line)
    assert speculation.step_overhead(str(talker), repeats=2) == 18.0
    assert run == {1, 2, 3, 5, 9}
