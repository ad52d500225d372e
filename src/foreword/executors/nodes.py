"""The NUMA nodes of this machine: processors with memory of their own, as a rule those of one socket."""

from __future__ import annotations

import os
from pathlib import Path

from foreword.errors import ConfigError
from foreword.machine import processors

_NODES = Path("/sys/devices/system/node")


def numa_nodes(folder: Path = _NODES) -> list[list[int]]:
    """Return the processors of each node that this process may use, ascending; nodes without any are left out.

    Empty where the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = set(processors())
    names = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = [sorted(usable & _listed((path / "cpulist").read_text())) for path in names]
    return [node for node in nodes if node]


def first_nodes(count: int | None) -> list[list[int]]:
    """Return the processors of the first ``count`` nodes; none for None. Raise ConfigError if there are fewer nodes."""
    if count is None:
        return []
    nodes = numa_nodes()
    if not 1 <= count <= len(nodes):
        most = f"at most {len(nodes)}" if nodes else "None: the system does not name its nodes"
        raise ConfigError(f"numa_nodes={count}: must be at least 1, and {most} here")
    return nodes[:count]


def _listed(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
