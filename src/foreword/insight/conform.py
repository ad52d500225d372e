"""Replay a trace of steps from any engine and report where its tensors differ from the definition.

docs/conformance.md has the format. Golden traces made from the definition ship in ``vectors/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foreword.batch import Backend
from foreword.errors import ForewordError, PlanError
from foreword.trace.compare import Difference, first_difference
from foreword.trace.events import Step
from foreword.trace.privacy import OF_TOKENS
from foreword.trace.reader import TraceReader
from foreword.trace.replay import Replay

VECTORS = Path(__file__).parent / "vectors"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay. damage: the reason why it ended before the end of the file."""

    path: str
    num_steps: int
    num_tensors: int
    differences: tuple[Difference, ...]
    damage: PlanError | None = None

    @property
    def ok(self) -> bool:
        return not self.differences and self.damage is None

    def __str__(self) -> str:
        head = f"{self.path}: {self.num_steps} steps, {self.num_tensors} tensors compared"
        rest = [] if self.damage is None else [f"the replay ended early: {self.damage}"]
        if not self.differences:
            return "\n  ".join([f"{head}: all as defined", *rest])
        return "\n  ".join([f"{head}: {len(self.differences)} differ", *map(str, self.differences), *rest])


def golden_vectors() -> list[Path]:
    """Return the traces that ship with the library."""
    return sorted(VECTORS.glob("*.jsonl"))


def run(path: str | Path, *, backend: Backend = "auto", strict: bool = True) -> Report:
    """Replay a trace and report the first difference of each tensor of each step.

    Raise PlanError, with the line, for a trace that cannot be replayed. With strict=False the error becomes the
    report's ``damage``, and the events before it are compared. A first line that cannot be read always raises.
    """
    reader = TraceReader(path)
    try:
        replay = Replay(reader.header, backend=backend, max_num_reqs=reader.num_lines())
    except ForewordError as error:
        raise PlanError(f"{path}, line 1: {error}") from error
    differences, num_tensors, damage = list[Difference](), 0, None
    omitted = reader.header.token_ids == "omitted"
    try:
        for event in reader:
            try:
                batch = replay.apply(event)
            except ForewordError as error:
                raise PlanError(f"{path}, line {event.line}: {error}") from error
            if batch is None or not isinstance(event, Step):
                continue
            for name, theirs in event.tensors.items():
                if omitted and name in OF_TOKENS:
                    continue
                num_tensors += 1
                found = first_difference(batch, name, theirs, line=event.line, step=replay.step)
                if found is not None:
                    differences.append(found)
    except PlanError as error:
        if strict:
            raise
        damage = error
    return Report(str(path), replay.num_steps, num_tensors, tuple(differences), damage)
