"""Run the commands of a job of .github/workflows on this machine, in a clone of the last commit.

    python tools/workflows.py                            list the jobs, with their commands
    python tools/workflows.py docs.build                 run the commands of a job, one block after the other
    python tools/workflows.py nightly.long verb=sglang   with this value of its matrix, and the first ones of the others

The clone is empty, as a host's is, and `python` is that of the version that the job sets up. Other actions do not run,
and neither do blocks that change the system or the repository's host, or that have a condition: they are listed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "workflows"
ELSEWHERE = re.compile(r"^\s*(sudo|gh)\s", re.M)
"""Programs that change the system or the host."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", help="WORKFLOW.JOB")
    parser.add_argument("values", nargs="*", help="NAME=VALUE of the matrix")
    given = parser.parse_args()
    found = dict(jobs())
    if given.job is None:
        for name, job in found.items():
            print(name, *(f"{key}={'|'.join(map(str, values))}" for key, values in matrix(job).items()))
            for text, note in blocks(job, {}):
                print(*(f"    {note}{line}" for line in text.splitlines()), sep="\n")
    elif given.job not in found:
        sys.exit(f"{given.job}: no such job; these are there: {', '.join(found)}")
    else:
        run(given.job, found[given.job], chosen_values(given.values, matrix(found[given.job])))


def chosen_values(given: list[str], values: dict[str, list[Any]]) -> dict[str, str]:
    """Return a value for each name of a matrix: the given one, or the first. End the program for others."""
    chosen = {name: str(ones[0]) for name, ones in values.items()}
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or name not in values:
            sys.exit(
                f"{text}: must be NAME=VALUE with a name of the job's matrix, {', '.join(values) or 'which is empty'}"
            )
        if value not in map(str, values[name]):
            sys.exit(f"{text}: the values of {name} are {', '.join(map(str, values[name]))}")
        chosen[name] = value
    return chosen


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.stem}.{name}", job


def matrix(job: dict[str, Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = job.get("strategy", {}).get("matrix", {})
    return found


def blocks(job: dict[str, Any], chosen: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the text of each block, and why it is not run here; "" if it is."""
    for step in job["steps"]:
        if "run" in step:
            text = filled(step["run"], chosen)
            yield text, "(not here) " if "if" in step or ELSEWHERE.search(text) else ""


def filled(text: str, chosen: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda name: chosen.get(name[1], name[0]), text)


def run(name: str, job: dict[str, Any], chosen: dict[str, str]) -> None:
    clone = BUILD / name
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    programs = python_of(job, chosen) / "bin"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"CI": "true", "PATH": f"{programs}{os.pathsep}{environment['PATH']}"}
    for text, note in blocks(job, chosen):
        print(f"== {note}{text}", flush=True)
        if not note:
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", text], cwd=clone, env=environment, check=False)
            if done.returncode:
                sys.exit(f"{name}: exit status {done.returncode}")
    print(f"{name}: all commands that run here succeed")


def python_of(job: dict[str, Any], chosen: dict[str, str]) -> Path:
    """Return an environment of the Python that the job sets up; of this one if it sets up none."""
    wanted = [str(step["with"]["python-version"]) for step in job["steps"] if "setup-python@" in step.get("uses", "")]
    program = f"python{filled(wanted[0], chosen).split()[0]}" if wanted else sys.executable
    environment = BUILD / f"env-{Path(program).name}"
    if not (environment / "bin" / "python").exists():
        try:
            subprocess.run([program, "-m", "venv", environment], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{program}: {error}. Put it on the PATH, or choose another Python of the matrix, python=VERSION")
    return environment


if __name__ == "__main__":
    main()
