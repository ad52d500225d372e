"""The overlap benchmark measures both loops on equal outputs."""

from pathlib import Path

import pytest
from parts import overlap

from foreword.native import available


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_both_loops_are_measured_with_and_without_speculation(talker: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "PROMPTS", {"echo": ("Repeat this: one two three one two three one two",)})
    results = list(overlap.run(str(talker), at_once=(2,), max_tokens=8, repeats=1))
    modes = [(r.speculation, r.async_scheduling) for r in results]
    assert modes == [(False, False), (False, True), (True, False), (True, True)]
    assert all(r.step_ms > 0 and r.gap_us > 0 and r.tok_s > 0 for r in results)
    assert all(r.ratio == 1 for r in results if not r.async_scheduling)
