"""Targets of the fuzzer: a file in `fuzz/targets` per format, each with one `TARGET`. The file's name is the target's
name.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz.mutations import mutate_bytes

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Target:
    """An input format and the code that reads it.

    valid: makes inputs that are read without an error, once per run. read: the code under test, given an input and an
    empty folder for files that it needs; it may return or raise a `ForewordError`. mutate: a damaged copy of an input.
    hostile: makes inputs that are run unchanged, such as those that once did harm; they may be refused.
    seconds: limit of wall-clock time per input. memory: limit in bytes beyond what the process has at its start.
    """

    valid: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    mutate: Callable[[Random, bytes], bytes] = mutate_bytes
    hostile: Callable[[], Sequence[bytes]] = list
    seconds: float = 60.0
    memory: int = 512 << 20


def names() -> list[str]:
    """All targets."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> Target:
    target = importlib.import_module(f"fuzz.targets.{name}").TARGET
    assert isinstance(target, Target)
    return target


class Corpus:
    """The inputs of a target, numbered: the valid ones, the hostile ones, then mutations without end."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed, self.target = name, seed, load(name)
        self.valid, self.hostile = list(self.target.valid()), list(self.target.hostile())

    def __getitem__(self, case: int) -> bytes:
        """The input of this number, equal for equal seeds."""
        if case < self.num_fixed:
            return [*self.valid, *self.hostile][case]
        rng = Random(f"{self.seed} {self.name} {case}")
        return self.target.mutate(rng, rng.choice(self.valid))

    @property
    def num_fixed(self) -> int:
        return len(self.valid) + len(self.hostile)
