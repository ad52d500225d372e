"""A tiny model, and an import path to benchmarks/ and to helpers of other tests in every import mode of pytest."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from talking_model import write_talking_model


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model whose greedy answers are endless lower-case letters."""
    return write_talking_model(tmp_path_factory.mktemp("models") / "talker")
