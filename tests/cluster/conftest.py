"""A server of replicas."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_rig import Served, serving


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[Served]:
    """A server of two replicas of the tiny model."""
    names = "--served-model-name", "tiny", "--max-model-len", 100000, "--adapter-directory", talker.parent
    with serving(talker, *names) as found:
        yield found
