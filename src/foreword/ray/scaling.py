"""Decide the number of replicas, from why requests wait and how full the caches are."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

WAITING, PRESSURE = "foreword_waiting", "foreword_pressure"
"""Names of what each replica reports: requests that wait for blocks or rows, and the used share of blocks or rows."""

TARGET = 0.7  # pressure: above it, requests of the next minute would wait


def wanted_replicas(current: int, waiting: Mapping[Any, float], pressure: Mapping[Any, float]) -> int:
    """Return the number of replicas for a mean pressure of about `TARGET`; more than now while requests wait, fewer
    only if none do.
    """
    if not pressure:
        return current
    needed = ceil(round(sum(pressure.values()) / TARGET, 6))
    if sum(waiting.values()) >= 1:
        return max(needed, current + 1)
    return max(needed, 1)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return an autoscaling policy of Ray Serve. Its delays and bounds are those of the application's configuration."""
    found = context.aggregated_metrics or {}
    wanted = wanted_replicas(context.current_num_replicas, found.get(WAITING, {}), found.get(PRESSURE, {}))
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, low), high), {}
