"""Counts of a storm: per module where it struck, and the violations with the command that repeats each."""

import sys
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from interrupts import Hang
from scenes import Violation

SHOWN = 3  # violations of each kind


@dataclass
class Tally:
    """The events of a storm, by module."""

    verbose: bool = False
    results: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_injected(self) -> int:
        return sum(counts.total() for where, counts in self.results.items() if where != "not reached")

    def add(self, hit: str | None, result: str) -> None:
        where = "not reached" if hit is None else hit.split(":")[0]
        self.results[where][result] += 1
        if self.verbose:
            print(f"{result:14} {hit}", flush=True)

    def fail(self, hit: str | None, error: BaseException, repeat: str) -> None:
        kind = kind_of(error)
        self.add(hit or "unknown place:", kind)
        self.violations[kind].append(f"interrupted at {hit}\n    {repeat}\n    {describe(error)}")

    def report(self) -> None:
        columns = sorted({result for counts in self.results.values() for result in counts})
        print(f"\n{'interrupted in':34}" + "".join(f"{c[:22]:>24}" for c in columns))
        for where, counts in sorted(self.results.items(), key=lambda item: -item[1].total()):
            print(f"{where:34}" + "".join(f"{counts[c] or '':>24}" for c in columns))
        for kind, found in self.violations.items():
            print(f"\n{len(found)} × {kind}")
            for text in found[:SHOWN]:
                print("  " + text)
        sys.stdout.flush()


def kind_of(error: BaseException) -> str:
    if isinstance(error, Violation):
        return error.kind
    return "hang" if isinstance(error, Hang) else f"raises {type(error).__name__}"


def describe(error: BaseException) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:3000]}  ({at.filename.split('/src/')[-1]}:{at.lineno})"


def causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
