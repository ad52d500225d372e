"""The public surface: what a version promises to those that follow. docs/stability.md says which names are public.

    PYTHONPATH=src python tools/surface.py            write tests/data/surface.json, as a release does

A test compares the list of the last release with the present names: a missing name fails it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from foreword.batch.step.layout import FIELDS
from foreword.cli.app import COMMANDS, real_command
from foreword.engine.config import GROUPS
from foreword.engine.options import ADAPTER, EXECUTOR, MODEL, PLUG_INS
from foreword.executors.kinds import KINDS
from foreword.server.config import ServerConfig
from foreword.server.metrics import ServerMetrics
from foreword.server.models_metrics import ModelsMetrics
from foreword.server.operations import OPERATIONS
from foreword.settings import settings_of
from foreword.trace.header import READABLE

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "data" / "surface.json"
MODULES = ("foreword", "foreword.batch", "foreword.batch.adapters", "foreword.batch.difference", "foreword.shadow")


def surface() -> dict[str, list[str]]:
    """Return kind → names, in order."""
    found: dict[str, Iterable[str]] = {
        **{f"names of {module}": import_module(module).__all__ for module in MODULES},
        **{f"options of foreword {words}": options for words, options in commands().items()},
        "routes": (f"{one.method} {one.shown_path}" for one in OPERATIONS),
        **{
            f"fields of {one.method} {one.shown_path}": one.body.schema()["properties"]
            for one in OPERATIONS
            if one.body is not None
        },
        "settings": set(settings()),
        "metrics": set(metrics()),
        "extras": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"],
        "tensors": FIELDS,
        "versions of traces that are read": map(str, READABLE),
    }
    return {kind: sorted(names) for kind, names in found.items() if names}


def settings() -> Iterator[str]:
    """Yield the names of options of `LLM`, of lines of files and, without their beginnings, of variables."""
    yield from (one.name for one in (MODEL, ADAPTER, EXECUTOR, *PLUG_INS))
    for known in (*GROUPS.values(), *(settings_of(kind.options) for kind in KINDS.values()), settings_of(ServerConfig)):
        yield from known


def metrics() -> Iterator[str]:
    """Yield the names of metrics of a server of one model and of several, except those that few machines have.

    Names do not depend on the engine, so a stand-in has any value that they show.
    """
    for collector in (ServerMetrics(MagicMock(), "model", None), ModelsMetrics(MagicMock())):
        yield from (family.name for family in collector.collect() if family.name != "foreword:joules")


def commands() -> dict[str, list[str]]:
    """Return the words of each command → its options and arguments."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command: Any = real_command(name)
        parts = {f"{name} {word}": part for word, part in getattr(command, "commands", {}).items()}
        for words, one in (parts or {name: command}).items():
            found[words] = [
                option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)
            ]
    return found


if __name__ == "__main__":
    lines = ",\n".join(f" {json.dumps(kind)}: {json.dumps(names)}" for kind, names in surface().items())
    LIST.write_text(f"{{\n{lines}\n}}\n")
