"""Three kills of processes that save blocks; `tests/storms/disk_storm.py` makes any number."""

from disk_storm import storm


def test_what_killed_processes_saved_gives_equal_tokens(tmp_path):
    loaded = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        loaded.append(storm(folder, seed))
    assert sum(loaded) > 0
