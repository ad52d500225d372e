"""Check that the proofs of the reference pages prove their rows: `make proofs`.

For each name of each row the name is corrupted in every way that `reference.mutations` has, and the row's tests alone
are run. The pair (row, name) passes if some test fails under each corruption. The tests are collected once; each
corruption runs in a forked process.

--control installs the corruptions without their effect: what fails then fails because of the way a corruption is
installed, and would be no proof of anything. Run it after a change of `reference.mutations`.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS)] * (str(TESTS) not in sys.path)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads: this process forks

from reference.mutations import Effect, Mutation, mutations  # noqa: E402
from reference.pages import PAGES, Row, rows  # noqa: E402

QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis is imported here, before pytest loads it
LIMIT = 120  # seconds per run
CAUGHT, SURVIVED, UNREACHED, BROKEN, ENDED = range(5)
WORDS = {
    SURVIVED: "the tests pass",
    UNREACHED: "the tests pass, and never read it",
    BROKEN: "no corruption for it, or no such test",
    ENDED: f"no result: the process crashed, or ran for {LIMIT} s",
}


@dataclass(frozen=True)
class Job:
    """One corruption, or none (``mutation`` None: the tests have to pass), and the tests that are run."""

    row: Row
    name: str
    mutation: Mutation | None


def jobs(folder: Path) -> list[Job]:
    """Every corruption of every name of every row, after one run of each test without any."""
    table = rows(folder)
    plain = {row.proofs: Job(row, "", None) for row in table}
    return [*plain.values(), *(Job(row, name, m) for row in table for name in row.ours for m in _of(row, name))]


def _of(row: Row, name: str) -> list[Mutation]:
    """The corruptions of a name; where it has none, one that cannot be installed."""
    try:
        return mutations(row, name)
    except LookupError as error:
        return [Mutation(str(error), None)]


class Runner:
    """A pytest plugin that runs jobs in place of the collected tests."""

    def __init__(self, work: list[Job], parallel: int, control: bool) -> None:
        self.work, self.parallel, self.control = work, parallel, control
        self.results: dict[int, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self.items[f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"].append(item)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        running: dict[int, int] = {}
        waiting = [(i, job) for i, job in enumerate(self.work) if job.mutation is None or job.mutation.install]
        while waiting or running:
            while waiting and len(running) < self.parallel:
                index, job = waiting.pop(0)
                sys.stdout.flush()
                pid = os.fork()
                if not pid:
                    self.child(job)
                running[pid] = index
            pid, status = os.wait()
            if pid in running:
                code = os.waitstatus_to_exitcode(status)
                self.results[running.pop(pid)] = code if code >= 0 else ENDED
        return True

    def child(self, job: Job) -> None:
        """Install the corruption, run the tests up to the first failure, and end this process."""
        signal.alarm(LIMIT)
        sink = os.open(os.devnull, os.O_WRONLY)
        error = os.dup(2)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        code = BROKEN
        try:
            Effect.active = not self.control
            if job.mutation is not None and job.mutation.install is not None:
                job.mutation.install()
            code = SURVIVED
            items = [item for proof in job.row.proofs for item in self.items[proof]]
            for item, following in zip_longest(items, items[1:]):
                if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                    code = CAUGHT
                    break
            if code == SURVIVED and not Effect.changed:
                code = UNREACHED
            if not items or Effect.error is not None:
                code = BROKEN
                os.write(error, f"{job.row} {job.name}: {Effect.error or 'no such test'}\n".encode())
        except BaseException:
            os.write(error, traceback.format_exc().encode())
            code = BROKEN
        finally:
            os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path, default=PAGES, help="the folder of the pages")
    parser.add_argument("--sample", type=int, metavar="N", help="N corruptions, spread over all rows")
    parser.add_argument("--only", default="", help="rows whose place, or name, contains this text")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument(
        "--control", action="store_true", help="install one corruption per name without its effect: all tests must pass"
    )
    options = parser.parse_args()
    start = time.monotonic()
    work = [job for job in jobs(options.pages) if options.only in f"{job.row} {job.name}"]
    if options.control:
        work = list({job.name: job for job in reversed(work) if job.mutation}.values())
    if options.sample:
        real = [job for job in work if job.mutation]
        work = real[:: max(1, len(real) // options.sample)][: options.sample]
    files = sorted(
        {file for job in work for proof in job.row.proofs for file in TESTS.rglob(f"{proof.split('::')[0]}.py")}
    )
    settings.register_profile("proofs", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("proofs")  # the first failing example is enough
    runner = Runner(work, options.parallel, options.control)
    pytest.main([*map(str, files), "-qq", "--no-header", "-p", "no:cacheprovider", *QUIET], plugins=[runner])
    failed = defaultdict(list)
    for index, job in enumerate(work):
        code = runner.results.get(index, BROKEN)
        if job.mutation is None or options.control:
            if code not in (SURVIVED, UNREACHED):
                failed[job.row, job.name].append("the tests fail without any corruption")
        elif code != CAUGHT:
            failed[job.row, job.name].append(f"{job.mutation.label}: {WORDS[code]}")
    for (row, name), reasons in failed.items():
        print(f"{row}  {name}  ({', '.join(row.proofs)})", *reasons, sep="\n    ")
    pairs = {(job.row, job.name) for job in work if job.mutation}
    corruptions = sum(job.mutation is not None for job in work)
    print(f"{corruptions} corruptions of {len(pairs)} names in rows, {time.monotonic() - start:.0f} s")
    print(f"{len(pairs - failed.keys())} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
