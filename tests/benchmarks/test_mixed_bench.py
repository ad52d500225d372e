"""The benchmark of mixed load measures each share on the same requests."""

from pathlib import Path

import pytest
from parts import mixed

from foreword.native import available


@pytest.mark.long
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_each_share_is_measured_while_prompts_arrive(talker: Path):
    results = list(mixed.run(str(talker), shares=[1.0, 0.5], at_once=2, prompt_tokens=40, steps=60))
    assert [(r.share, r.at_once) for r in results] == [(1.0, 2), (0.5, 2)]
    assert all(0 < r.p50_ms <= r.p99_ms and r.ratio >= 1 and r.first_token_ms > 0 and r.tok_s > 0 for r in results)
