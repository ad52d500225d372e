"""Three kills of processes that save blocks; `tests/storms/disk_storm.py` makes any number."""

import pytest
from disk_storm import KINDS, storm


@pytest.mark.long
def test_what_killed_processes_saved_gives_equal_tokens(tmp_path):
    loaded = []
    for seed, kind in enumerate(KINDS):
        folder = tmp_path / kind
        folder.mkdir()
        loaded.append(storm(folder, seed, kind))
    assert sum(loaded) > 0
