"""Counters of the check in the registry of prometheus_client, which vLLM's own metrics use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from foreword.shadow import Finding

with suppress(ImportError):  # vLLM installs it; the tests of this library run without it
    import prometheus_client


class Counters:
    """``foreword_steps_checked`` and ``foreword_findings`` by tensor."""

    def __init__(self) -> None:
        self._steps: Any = None
        self._findings: Any = None
        if "prometheus_client" in globals():
            self._steps = prometheus_client.Counter("foreword_steps_checked", "Steps whose tensors were compared.")
            self._findings = prometheus_client.Counter(
                "foreword_findings", "Findings of the check of steps, by tensor.", ["tensor"]
            )

    @staticmethod
    @cache
    def of_process() -> Counters:
        """Return the counters of this process, because a name can be registered only once."""
        return Counters()

    def count(self, is_compared: bool, found: Sequence[Finding]) -> None:
        """Count a step and its findings."""
        if self._steps is None:
            return
        if is_compared:
            self._steps.inc()
        for finding in found:
            self._findings.labels(finding.tensor).inc()
