"""Results of benchmarks as data: one file per run in ``benchmarks/results``, from which docs/benchmarks.md is made.

    python tools/benchmark_results.py host --machine "EPYC Zen 4" -- python benchmarks/vllm_host.py --json

runs a command that prints its results as JSON lines, and saves them with the date, the commit, the processor and the
command. `make pages` makes the page: a run replaces an earlier one of the same question on the same machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
QUESTIONS = (
    "engines", "larger-model", "hybrid", "long-prompts", "host", "loop", "front-ends", "speculation", "quality",
    "startup", "embeddings", "transformers", "families", "families-llama-cpp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark on one machine.

    machine: the name in tables; processor: what it is. date: as 2026-11-23. commit: of Foreword, with ``-changed`` if
    files differed from it; None: not recorded. note: what a reader must know to compare. results: the lines of the
    benchmark's ``--json``.
    """

    question: str
    machine: str
    processor: str
    date: str
    commit: str | None
    command: str
    note: str
    results: list[dict[str, Any]]

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS:
            raise ValueError(f"question {self.question!r}: must be of {', '.join(QUESTIONS)}")
        date.fromisoformat(self.date)
        if not self.results:
            raise ValueError(f"{self.question}: the command printed no results as JSON lines")

    @property
    def file_name(self) -> str:
        return f"{self.date}-{self.question}-{re.sub(r'[^a-z0-9.]+', '-', self.machine.lower()).strip('-')}.json"

    def text(self) -> str:
        """Return the file: one line per field and per result, so that changes are readable."""
        fields = asdict(self)
        lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in fields.pop("results"))
        head = "".join(
            f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)},\n" for name, value in fields.items()
        )
        return f'{{\n{head} "results": [\n{lines}\n ]\n}}\n'


def read(folder: Path = FOLDER) -> list[Run]:
    """Return all runs, the earliest first."""
    return [Run(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def newest(runs: Iterable[Run], question: str) -> list[Run]:
    """Return the newest run of each machine, in the order in which the machines were first measured."""
    return list({run.machine: run for run in runs if run.question == question}.values())


def processor() -> str:
    """Return the processor's name, and the number of cores that this process may use."""
    from foreword.machine import num_processors

    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}; {num_processors()} cores"


def commit() -> str:
    """Return the commit of the working tree."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("-changed" if git("status", "--porcelain") else "")


def measured(question: str, machine: str, note: str, command: list[str]) -> Run:
    """Run a command and return its JSON lines as a run of today. subprocess.CalledProcessError if it fails."""
    here, revision = processor(), commit()  # first, so that an error here costs no run
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Run(question, machine or here, here, date.today().isoformat(), revision, shlex.join(command), note, results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a benchmark and save its results in benchmarks/results.")
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--machine", default="", help="its name in tables (default: the processor's)")
    parser.add_argument("--note", default="", help="what a reader must know, such as other work on the machine")
    parser.add_argument("command", nargs="+", help="after --: a command that prints JSON lines")
    args = parser.parse_args()
    run = measured(args.question, args.machine, args.note, args.command)
    path = FOLDER / run.file_name
    path.write_text(run.text(), encoding="utf-8")
    print(f"{path}: {len(run.results)} results; `make pages` shows them", file=sys.stderr)


if __name__ == "__main__":
    main()
