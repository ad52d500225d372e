"""A finding of a shadow: one wrong tensor of one request in one step, and who made it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from foreword.errors import ForewordError, shown

Origin = Literal["runner", "scheduler"]
_SAYS = {"runner": "the runner wrote", "scheduler": "the scheduler said"}
_LOGGER = logging.getLogger(__name__)

# Causes come before their consequences. Tensors that are not listed here come between the last two.
_CAUSES = (
    "req_ids", "scheduler_output", "num_computed_tokens", "num_scheduled_tokens", "draft_tokens", "plan",
    "block_table", "positions", "input_ids", "slot_mapping", "read_slots", "", "cache",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The entries of one tensor, or slots of one KV group's cache, that are wrong for one request in one step.

    step: number of the followed step, from 1. tensor: its name in docs/tensors.md, "cache" for the content of slots,
    or the part of the scheduler's output. group: the KV group where there is one per group, else None.
    index: of the first wrong entry, in batch order; (request of the batch, entry of its blocks) for "cache".
    request: None where the entry belongs to no request. expected, got: of that entry. count: wrong entries.
    origin: "scheduler" where the decision itself is wrong, "runner" where the tensor does not follow from it.
    why: what the entry stands for, as a sentence.
    """

    step: int
    tensor: str
    group: int | None
    index: tuple[int, ...]
    request: str | None
    expected: object
    got: object
    count: int
    origin: Origin
    why: str = ""

    def __str__(self) -> str:
        name = self.tensor if self.group is None else f"{self.tensor}[{self.group}]"
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        owner = "" if self.request is None else f" of request {self.request!r}"
        more = "" if self.count == 1 else f", {self.count} entries differ"
        says = "holds" if self.tensor == "cache" else _SAYS[self.origin]
        text = f"step {self.step}: {name}{at}{owner}: {says} {shown(self.got)}, expected {shown(self.expected)}{more}"
        return f"{text}\n    {self.why}" if self.why else text


class FindingError(ForewordError, RuntimeError):
    """The error that `raise_finding` raises. finding: the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def log_finding(finding: Finding) -> None:
    """Log the finding as an error: a function for ``on_finding``."""
    _LOGGER.error("%s", finding)


def raise_finding(finding: Finding) -> None:
    """Raise the finding as a `FindingError`: a function for ``on_finding``."""
    raise FindingError(finding)


def in_causal_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of one step, request by request, each cause before its consequences."""
    found = list(findings)
    requests = {finding.request: i for i, finding in reversed(list(enumerate(found)))}
    causes = {name: i for i, name in enumerate(_CAUSES)}
    return sorted(found, key=lambda f: (f.request is not None, requests[f.request], causes.get(f.tensor, causes[""])))
