"""`python benchmarks serve` serves every request that it counts."""

import pytest
from parts import front

from foreword.errors import EngineError


@pytest.mark.long
def test_streams_are_served_with_and_without_http(talker, monkeypatch):
    monkeypatch.setattr(front, "NUM_JOINING", 3)
    monkeypatch.setattr(front, "NUM_BURSTS", 3)
    (result,) = front.run(streams=(3,), num_tokens=8, rounds=1, model=str(talker))
    assert result.num_streams == 3
    assert result.tok_s == pytest.approx(8 * result.requests_s)
    assert min(result.plain_tok_s, result.joining_ms, result.burst_ms) > 0


@pytest.mark.long
def test_a_server_that_does_not_start_is_told():
    with pytest.raises(EngineError, match=r"none\.gguf"):
        front.ready("none.gguf")
