"""Find what this process may use of its machine: processors and memory, within the limits of its control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path, PurePosixPath

from foreword.errors import ConfigError

ROOT = Path("/")
MAX_THREADS = 1024
VARIABLE = "FOREWORD_NUM_THREADS"


def processors() -> list[int]:
    """Return the numbers of the processors that this process may use: its affinity, which a cpuset limits too."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_processors(root: Path = ROOT) -> int:
    """Return how many processors this process may use at the same time, a part of one counted as one."""
    usable, quota = len(processors()), cpu_quota(root)
    return usable if quota is None else min(usable, ceil(quota))


def default_threads(groups: Sequence[Sequence[int]] = (), root: Path = ROOT) -> int:
    """Return the number of threads where none is given: that of the variable, else the physical cores of the usable
    processors, at most as many as a quota of processor time is enough for.

    groups: processors in place of all that are usable. Threads wait for each other in each layer, so that one that the
    quota stops delays all. Raise ConfigError for a variable that is not a number of threads.
    """
    if variable := os.environ.get(VARIABLE):
        if not re.fullmatch("[0-9]{1,4}", variable) or not 1 <= int(variable) <= MAX_THREADS:
            raise ConfigError(f"{VARIABLE} = {variable!r:.80}: must be a number of threads from 1 to {MAX_THREADS}")
        return int(variable)
    cpus = sorted({cpu for group in groups for cpu in group}) or processors()
    topology = root / "sys/devices/system/cpu"
    cores = len({read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})
    quota = cpu_quota(root)
    return min(cores if quota is None else min(cores, max(1, int(quota))), MAX_THREADS)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many processors' time the control groups of this process may use; None without a limit."""
    pairs = [text.split() for (text,) in _limits(root, "", "cpu.max")]
    pairs += _limits(root, "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min(
        (int(pair[0]) / int(pair[1]) for pair in pairs if all(map(str.isdecimal, pair)) and int(pair[1])), default=None
    )


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes the control groups of this process may use; None without a limit."""
    texts = [text for name in ("memory.max", "memory.high") for (text,) in _limits(root, "", name)]
    texts += [text for (text,) in _limits(root, "memory", "memory.limit_in_bytes")]
    found = [int(text) for text in texts if text.isdecimal()]
    return min((count for count in found if count < 2**60), default=None)  # above: the first version's "no limit"


def memory_sizes(root: Path = ROOT) -> dict[str, int]:
    """Return the bytes of each line of /proc/meminfo, by its name."""
    lines = [line for line in read(root / "proc/meminfo").splitlines() if line.endswith("kB")]
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may use: the machine's memory or a control group's limit, None if unknown."""
    found = (memory_sizes(root).get("MemTotal"), memory_limit(root))
    return min((count for count in found if count is not None), default=None)


def own_memory_bytes(root: Path = ROOT) -> int:
    """Return how many bytes of this process are resident, without pages of files; 0 where the system does not tell."""
    lines = [line.split() for line in read(root / "proc/self/status").splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))


def read(path: Path) -> str:
    """Return the text of a small file, without spaces around it; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _limits(root: Path, controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the texts of these files in the control group of this process and in each above it that has them.

    controller: of the first version of control groups; "": the second version. A container sees its own group as the
    uppermost, also where its path is that of the host.
    """
    mounts = [f"sys/fs/cgroup/{controller}"] if controller else ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
    own = PurePosixPath("/")
    for line in read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and (controller or number == "0"):
            own = PurePosixPath("/", path)
    for mount in mounts:
        for group in (own, *own.parents):
            texts = [read(root / mount / group.relative_to("/") / name) for name in names]
            if all(texts):
                yield texts
