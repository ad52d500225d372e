"""Compare two commits in one interleaved run, to find what a change makes faster or slower (`make bench-regress`).

    python benchmarks/regress.py                                 # the last tag, or HEAD~1, and the working tree
    python benchmarks/regress.py --base HEAD~5 --only host,W1 --turns 30

Prepare and commit of 1, 8, 64 and 256 rows, the engine around a model that computes nothing, and short forms of W1 to
W6. The base runs in two processes and the change in one; in each turn, each of them gives a sample of every figure, in
rotating order. A figure is reported if its interval has neither 1 nor any ratio of the base to itself in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from regression import builds
from regression.differences import FEWEST, Difference, table

WORKER = Path(__file__).resolve().parent / "regression" / "worker.py"
SIZES = ("1", "8", "64", "256")
NAMES = (*(f"{kind} {size}" for kind in ("host", "engine") for size in SIZES), *(f"W{i}" for i in range(1, 7)))


class Worker:
    """A process that measures one checkout."""

    def __init__(self, sources: Path, model: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(sources)}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), model], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def sample(self, name: str) -> dict[str, float]:
        """Return the seconds of each figure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the measurement of {name} failed with status {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.communicate()


def compare(workers: Sequence[Worker], names: Sequence[str], turns: int) -> list[Difference]:
    """Measure the base twice and the change, the three ``workers``, in turns."""
    samples: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
    for turn in range(turns):
        print(f"\rturn {turn + 1} of {turns}", end="", file=sys.stderr, flush=True)
        for name in names:
            for at in range(3):
                which = (turn + at) % 3
                for figure, seconds in workers[which].sample(name).items():
                    samples[figure][which].append(seconds)
    print(file=sys.stderr)
    return [_difference(figure, *found) for figure, found in samples.items()]


def _difference(figure: str, *found: list[float]) -> Difference:
    unit, scale = ("s", 1.0) if figure.startswith("W") else ("µs", 1e6)
    return Difference.of(figure, unit, *([scale * seconds for seconds in one] for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a change makes faster or slower, beyond noise.")
    parser.add_argument("--base", default=builds.default_base(), help="a commit (default: the last tag, or HEAD~1)")
    parser.add_argument("--change", help="a commit (default: the working tree)")
    parser.add_argument("--turns", type=int, default=15, help=f"samples of each figure, at least {FEWEST}")
    parser.add_argument("--only", default="", help=f"beginnings of names among {', '.join(NAMES)}, by commas")
    parser.add_argument("--model", default="smollm2", help="the model of the workloads")
    parser.add_argument("--builds", type=Path, default=builds.DEFAULT_DIRECTORY, help="where other commits are built")
    parser.add_argument("--json", action="store_true", help="print JSON, one figure per line")
    args = parser.parse_args()
    names = [name for name in NAMES if name.startswith(tuple(args.only.split(",")))]
    if args.turns < FEWEST or not names:
        parser.error(f"--turns {args.turns}: at least {FEWEST}" if names else f"--only {args.only}: names no figure")
    base = builds.checkout(args.base, args.builds)
    change = builds.checkout(args.change, args.builds) if args.change else builds.build(builds.ROOT)
    workers = [Worker(sources, args.model) for sources in (base, base, change)]
    differences = compare(workers, names, args.turns)
    for worker in workers:
        worker.close()
    if args.json:
        for one in differences:
            print(json.dumps({**asdict(one), "verdict": one.verdict}))
        return
    print(f"{args.change or 'the working tree'} against {args.base}, {args.turns} turns, times")
    print("\n".join(table(differences)))


if __name__ == "__main__":
    main()
