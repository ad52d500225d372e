"""The sampling benchmark measures every set of parameters, with and without a model."""

from pathlib import Path

import pytest
from parts import sampling

from foreword.native import available


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "NUM_REQS", 3)
    monkeypatch.setattr(sampling, "VOCAB_SIZES", (500, 900))


def test_without_the_model_there_is_no_share_of_its_step(small, tmp_path: Path):
    results = list(sampling.run(model=str(tmp_path / "missing.gguf"), repeats=1))
    assert [(r.vocab_size, r.parameters) for r in results] == [(v, n) for v in (500, 900) for n in sampling.PARAMETERS]
    assert all(r.ms > 0 and r.share is None for r in results)
    assert all(str(r) for r in results)


@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_with_the_model_the_share_of_its_step_is_reported(small, smollm2_path: Path):
    results = list(sampling.run(model=str(smollm2_path), repeats=1))
    assert all(r.share is not None and r.share > 0 for r in results)
