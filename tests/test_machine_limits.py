"""Limits of processors and memory, on machines made of files."""

from __future__ import annotations

import os

import pytest

from foreword import machine
from foreword.errors import ConfigError
from foreword.machine import cpu_quota, default_threads, memory_bytes, memory_limit, num_processors, own_memory_bytes

UNLIMITED = "9223372036854771712"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def first(group, quota, period="100000"):
    """The files of a group of the first version."""
    folder = f"sys/fs/cgroup/cpu{group}"
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (first("", "50000"), 0.5),
        (first("", "-1"), None),
        (first("", "50000", "0"), None),
        ({"sys/fs/cgroup/cpu.max": "odd"}, None),
        ({}, None),
        # the group of this process is below the mounted one
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "100000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/other/cpu.max": "100000 100000"}, None),
        ({"proc/self/cgroup": "5:cpu,cpuacct:/docker/1", **first("/docker/1", "400000")}, 4),
        ({"proc/self/cgroup": "5:cpuset:/docker/1", **first("/docker/1", "400000")}, None),
        # a container, whose path is the host's and whose group is the mounted one
        ({"proc/self/cgroup": "5:cpu:/docker/1", **first("", "250000")}, 2.5),
        ({"sys/fs/cgroup/unified/cpu.max": "50000 100000"}, 0.5),
    ],
)
def test_the_quota_is_the_least_of_the_groups_of_this_process(tmp_path, files, quota):
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": "max"}, None),
        ({"sys/fs/cgroup/memory.max": "1000"}, 1000),
        ({"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.high": "700"}, 700),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "900", "sys/fs/cgroup/memory.max": "max"}, 900),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED}, None),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000"}, 1000),
        ({"proc/self/cgroup": "9:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "800"}, 800),
        ({}, None),
    ],
)
def test_the_limit_of_memory_is_the_least_of_the_groups_of_this_process(tmp_path, files, limit):
    root = write(tmp_path, files)
    assert memory_limit(root) == limit
    assert memory_bytes(root) == limit
    write(root, {"proc/meminfo": "MemTotal: 1 kB\nMemFree: 1 kB"})
    assert memory_bytes(root) == (1024 if limit is None else min(limit, 1024))


@pytest.mark.parametrize(
    ("usable", "siblings", "quota", "threads", "at_once"),
    [
        ([0, 1, 2, 3], {}, None, 4, 4),
        ([0, 1, 2, 3], {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, None, 2, 4),  # hardware threads of two cores
        ([0, 1, 2, 3], {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, "100000 100000", 1, 1),
        ([0, 1, 2, 3], {}, "250000 100000", 2, 3),
        ([0, 1, 2, 3], {}, "50000 100000", 1, 1),
        ([0, 1, 2, 3], {}, "900000 100000", 4, 4),
        ([5], {}, "900000 100000", 1, 1),  # a cpuset
    ],
)
def test_the_default_number_of_threads(tmp_path, monkeypatch, usable, siblings, quota, threads, at_once):
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable), raising=False)
    for cpu, text in siblings.items():
        write(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text})
    if quota is not None:
        write(tmp_path, {"sys/fs/cgroup/cpu.max": quota})
    assert default_threads(root=tmp_path) == threads
    assert num_processors(tmp_path) == at_once
    assert default_threads([[0], [1, 2]], tmp_path) <= 3
    monkeypatch.setenv(machine.VARIABLE, "7")
    assert default_threads(root=tmp_path) == 7


@pytest.mark.parametrize("text", ["0", "two", "4x", "5000", "-1", "²", "9" * 5000])
def test_a_variable_that_is_no_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv(machine.VARIABLE, text)
    with pytest.raises(ConfigError, match=r"FOREWORD_NUM_THREADS = .*: must be a number of threads from 1 to 1024"):
        default_threads()


def test_the_memory_of_the_process_is_without_pages_of_files(tmp_path):
    assert own_memory_bytes(tmp_path) == 0
    write(
        tmp_path,
        {"proc/self/status": "Name:\tpython\nVmRSS:\t 9 kB\nRssAnon:\t 5 kB\nRssFile:\t 3 kB\nRssShmem:\t 1 kB"},
    )
    assert own_memory_bytes(tmp_path) == 6 * 1024
