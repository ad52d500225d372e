"""`python -m fuzz`: damaged inputs for every reader of files and requests.

Each case must be accepted, or refused with a `ForewordError`. A case that raises another exception, kills its process,
or exceeds its time or memory is a failure: its input is written to a file, and the command that runs it again printed.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are forked

from fuzz.runner import FAILED, outcomes, run
from fuzz.target import Corpus, load, names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of: {', '.join(names())}; none: all")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the mutations; default: the time")
    parser.add_argument("--seconds", type=float, default=180.0, help="in total (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="mutations per target, instead of --seconds")
    parser.add_argument("--case", type=int, help="run this case of one target alone")
    parser.add_argument("--file", type=Path, help="run this input of one target alone")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(names()):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    targets = given.targets or names()
    if given.case is not None or given.file:
        if len(targets) != 1:
            parser.error("--case and --file need one target")
        data = given.file.read_bytes() if given.file else Corpus(targets[0], given.seed)[given.case]
        print(next(outcomes(load(targets[0]), [(0, data)]))[1])
        return 0
    print(f"seed {given.seed}")
    num_failures = num_cases = 0
    for name in targets:
        corpus = Corpus(name, given.seed)
        seconds = None if given.cases is not None else given.seconds / len(targets)
        report = run(corpus, num_cases=given.cases, seconds=seconds)
        total, failed = report.outcomes.total(), report.outcomes[FAILED]
        shown = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.items())
        print(f"{name:16} {total:7} cases: {shown}", flush=True)
        for case, what, count in report.failures.values():
            given.failures.mkdir(parents=True, exist_ok=True)
            path = given.failures / f"{name}-{given.seed}-{case}"
            path.write_bytes(corpus[case])
            print(f"\n{what.rstrip()}\n→ {count} cases, the first is {path}, which this runs again:")
            print(f"python -m fuzz {name} --seed {given.seed} --case {case}", flush=True)
        num_failures, num_cases = num_failures + failed, num_cases + total
    print(f"{num_cases} cases, {num_failures} failures")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
