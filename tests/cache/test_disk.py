"""The files of blocks on a disk: shared, bounded, whole or absent, and read only if they are what was written."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from foreword.cache import BlockFormat
from foreword.cache import disk as disk_module
from foreword.cache.disk import DiskTier
from foreword.cache.segment import read_segment, segment_bytes, write_segment
from foreword.errors import ConfigError

BLOCKS = BlockFormat(block_bytes=1000, key=b"k" * 16)


def name(number: int) -> bytes:
    return number.to_bytes(18, "little")


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCKS.block_bytes, np.uint8)


def put(tier: DiskTier, *numbers: int) -> None:
    names = [name(number) for number in numbers]
    assert tier.wants(names).all()
    tier.offer(names, np.stack([content(number) for number in numbers]))
    tier.flush()


def held(tier: DiskTier, *numbers: int) -> list[bool]:
    """Which of the blocks the tier gives; each is what was put."""
    data = np.zeros((len(numbers), BLOCKS.block_bytes), np.uint8)
    done = tier.read([name(number) for number in numbers], data).tolist()
    for number, block, is_there in zip(numbers, data, done, strict=True):
        assert not is_there or (block == content(number)).all()
    return done


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks-*/*"))


@pytest.fixture
def tiers():
    """Make tiers that are closed at the end."""
    made: list[DiskTier] = []

    def make(folder: Path, capacity: int = 1 << 20, blocks: BlockFormat = BLOCKS) -> DiskTier:
        made.append(DiskTier(folder, blocks, capacity=capacity))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def test_what_one_process_writes_the_others_find(tiers, tmp_path):
    one, other = tiers(tmp_path), tiers(tmp_path)
    assert not other.find([name(1)]).any()
    put(one, 1, 2, 3)
    assert other.find([name(i) for i in range(5)]).tolist() == [False, True, True, True, False]
    assert held(other, 3, 9, 1) == [True, False, True]
    assert not other.wants([name(2)]).any()


def test_another_model_or_version_finds_nothing(tiers, tmp_path):
    put(tiers(tmp_path), 1)
    assert not tiers(tmp_path, blocks=BlockFormat(1000, b"j" * 16)).find([name(1)]).any()


def test_files_are_readable_by_their_owner_alone(tiers, tmp_path):
    put(tiers(tmp_path), 1)
    [path] = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("at", [0, 9, 30, 44, 50, 70, 500, -1])
def test_a_changed_byte_is_a_miss_with_one_warning(tiers, tmp_path, caplog, at):
    put(tiers(tmp_path), 1, 2)
    [path] = files(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    tier = tiers(tmp_path)
    assert held(tier, 1, 2) == [False, False]
    assert held(tier, 1, 2) == [False, False]
    assert len(caplog.records) == 1
    put(tier, 1, 2)
    assert held(tier, 1, 2) == [True, True]


@pytest.mark.parametrize("size", [0, 10, 45, 80, 1500])
def test_a_file_that_was_cut_is_a_miss(tiers, tmp_path, size):
    put(tiers(tmp_path), 1, 2)
    [path] = files(tmp_path)
    os.truncate(path, size)
    assert not tiers(tmp_path).find([name(1), name(2)]).any()


def test_a_foreign_file_is_left_out(tiers, tmp_path):
    put(tiers(tmp_path), 1)
    (files(tmp_path)[0].parent / "notes.blocks").write_text("mine")
    assert held(tiers(tmp_path), 1) == [True]


def test_a_file_that_another_process_removed_is_a_miss(tiers, tmp_path):
    tier = tiers(tmp_path)
    put(tier, 1)
    files(tmp_path)[0].unlink()
    assert held(tier, 1) == [False]
    put(tier, 1)
    assert held(tier, 1) == [True]


def test_the_least_recently_used_files_make_room(tiers, tmp_path):
    size = segment_bytes(BLOCKS, 1)
    tier, other = tiers(tmp_path, 8 * size), tiers(tmp_path, 8 * size, BlockFormat(1000, b"j" * 16))
    for number in range(4):
        put(other if number == 3 else tier, number)
        for path in files(tmp_path):  # clocks of files are coarse
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
    assert held(tier, 0) == [True]  # used again
    for number in range(4, 11):
        put(tier, number)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 8 * size
    assert held(tier, 0, 1, 2, 10) == [True, False, False, True]
    assert held(other, 3) == [False]


def test_a_full_disk_saves_nothing_and_is_reported_once(tiers, tmp_path, monkeypatch, caplog):
    tier = tiers(tmp_path)
    put(tier, 1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_module, "write_segment", full)
    put(tier, 2)
    put(tier, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"prefix cache on disk: {tmp_path}: cannot be written (No space left on device); blocks are not saved"
    ]
    assert tier.num_dropped == 2
    monkeypatch.undo()
    put(tier, 2)
    assert held(tier, 1, 2, 3) == [True, True, False]


def test_blocks_beyond_the_queue_are_not_saved(tiers, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "QUEUE_BYTES", 3 * BLOCKS.block_bytes)
    assert tiers(tmp_path).wants([name(i) for i in range(5)]).tolist() == [True, True, True, False, False]


def test_what_killed_processes_left_is_removed_later(tiers, tmp_path):
    tier = tiers(tmp_path)
    put(tier, 1)
    left = files(tmp_path)[0].with_suffix(".blocks.99.part")
    left.write_bytes(b"x" * 100)
    put(tier, 2)
    assert left.exists()  # it may be of a process that writes now
    os.utime(left, (0, 0))
    put(tier, 3)
    assert not left.exists()
    assert held(tier, 1, 2, 3) == [True, True, True]


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        DiskTier(tmp_path / "file", BLOCKS, capacity=1 << 20)
    with pytest.raises(ConfigError, match="cache_bytes=10: a block takes"):
        DiskTier(tmp_path, BLOCKS, capacity=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_folder_of_another_user_is_refused(tiers, tmp_path):
    tiers(tmp_path)
    [folder] = tmp_path.glob("blocks-*")
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        tiers(tmp_path)


def test_a_folder_that_others_may_write_to_is_refused(tiers, tmp_path):
    tiers(tmp_path)
    [folder] = tmp_path.glob("blocks-*")
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="others may write"):
        tiers(tmp_path)


def test_a_file_that_two_threads_write_at_once_is_that_of_one(tmp_path):
    names = [name(i) for i in range(64)]
    data = np.stack([content(i) for i in range(64)])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: write_segment(tmp_path / "one", BLOCKS, names, data), range(16)))
    assert read_segment(tmp_path / "one", BLOCKS).names == tuple(names)
    assert [*tmp_path.iterdir()] == [tmp_path / "one"]
