"""The tiny model, and an import path to the helpers of the servers' tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from replica_rig import Served, serving
from talking_model import write_talking_model


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    """A server of two replicas of the tiny model."""
    names = "--served-model-name", "tiny", "--max-model-len", 100000, "--adapter-directory", talker.parent
    with serving(talker, *names) as found:
        yield found
