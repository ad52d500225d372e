"""The counts of a shadow so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreword.names import counted
from foreword.shadow.finding import Finding


@dataclass(frozen=True, slots=True)
class Report:
    """The counts of a shadow. num_steps: followed steps. num_compared: steps whose tensors were compared. num_tensors:
    compared tensors. num_refused: steps that could not be prepared. findings: the first findings. counts: the number of
    all findings, by tensor. microseconds: the mean per followed step, by phase.
    """

    num_steps: int
    num_compared: int
    num_tensors: int
    num_refused: int
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    microseconds: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return not self.counts

    def __str__(self) -> str:
        costs = ", ".join(f"{phase} {mean:.0f}" for phase, mean in self.microseconds.items())
        total = sum(self.counts.values())
        lines = [
            f"{counted(self.num_steps, 'step')} followed, {self.num_compared} compared, "
            f"{counted(self.num_tensors, 'tensor')}: {'no finding' if self.ok else counted(total, 'finding')}",
            f"microseconds per step: {costs}",
        ]
        if self.num_refused:
            lines.append(f"{counted(self.num_refused, 'step')} could not be prepared")
        if not self.ok:
            lines.append("by tensor: " + ", ".join(f"{name} {count}" for name, count in self.counts.items()))
        lines += (str(finding) for finding in self.findings)
        if total > len(self.findings):
            lines.append(f"… {total - len(self.findings)} more")
        return "\n".join(lines)
