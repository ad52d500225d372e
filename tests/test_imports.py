"""Imports between the modules of Foreword: no cycles, and only from higher layers to lower ones.

Every import counts, also those under TYPE_CHECKING and inside functions. An import from a package counts as an import
from the module that defines the name, so that an `__init__` that re-exports its modules is not part of a cycle.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

BASE = {"arrays", "errors", "fields", "jsonfile", "native", "_native"}
"""Modules that any other may import."""

LAYERS = {
    "batch": set(),
    "device": {"batch"},
    "models": set(),
    "media": set(),
    "messages": set(),
    "routing": set(),
    "cache": {"batch"},
    "scheduler": {"batch", "cache"},
    "simulation": {"batch", "cache", "routing", "scheduler"},
    "sampling": {"batch"},
    "executors": {"batch", "device", "media", "models", "sampling"},
    "structured": {"batch", "sampling"},
    "engine": {"batch", "cache", "scheduler", "media", "models", "messages", "sampling", "executors", "structured"},
    "insight": {"batch", "cache", "scheduler", "models", "messages", "sampling", "executors", "engine"},
    "openai": {"batch", "sampling", "engine", "media", "messages"},
    "anthropic": {"batch", "engine", "messages", "openai"},
    "kv_events": {"batch", "cache", "engine"},
    "server": {
        "batch",
        "media",
        "scheduler",
        "models",
        "messages",
        "sampling",
        "executors",
        "engine",
        "insight",
        "openai",
        "anthropic",
        "kv_events",
    },
    "cluster": {"routing", "server"},
    "ray": {"batch", "cluster", "engine", "openai", "routing", "server"},
    "bench": {
        "batch",
        "device",
        "cache",
        "scheduler",
        "simulation",
        "models",
        "messages",
        "sampling",
        "executors",
        "engine",
        "server",
    },
    "cli": {
        "batch",
        "cache",
        "scheduler",
        "simulation",
        "models",
        "messages",
        "sampling",
        "executors",
        "engine",
        "insight",
        "bench",
        "cluster",
        "ray",
        "openai",
        "routing",
        "server",
    },
    "__main__": {"cli"},
}
"""Package → the packages that it may import (docs/architecture.md)."""

ROOMS = {
    "values": set(),
    "state": {"values"},
    "step": {"values", "state"},
    "features": {"values", "state", "step"},
    "adapters": {"values", "state", "step", "features"},
    "proof": {"values", "state", "step", "features"},
    "prepare": {"values", "state", "step", "features", "adapters", "proof"},
    "difference": {"values", "state", "step", "prepare"},
}
"""Part of `foreword.batch` → the parts that it may import. A module belongs to the longest prefix."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, path: Path) -> list[tuple[str, str | None, str | None]]:
    """(module, imported name or None for `import module`, name that it binds) of every import in a file."""
    found: list[tuple[str, str | None, str | None]] = []
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, None, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(module, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def import_graph() -> dict[str, set[str]]:
    """Module → the modules that define what it imports."""
    paths = {module_name(path): path for path in sorted(SRC.glob("foreword/**/*.py"))}
    imports = {name: imports_of(name, path) for name, path in paths.items()}
    stubs = {module_name(path) for path in SRC.glob("foreword/**/*.pyi")}
    packages = {name for name, path in paths.items() if path.stem == "__init__"}

    def definer(module: str, name: str | None) -> str:
        submodule = f"{module}.{name}"
        if name is None or submodule in paths or submodule in stubs:
            return module if name is None else submodule
        if module in packages:
            for source, imported, bound in imports[module]:
                if bound == name and source.startswith("foreword"):
                    return definer(source, imported)
        return module

    return {
        name: {definer(module, imported) for module, imported, _ in found if module.split(".")[0] == "foreword"}
        for name, found in imports.items()
    }


GRAPH = import_graph()


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            new = graph.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        return seen

    reach = {name: reachable(name) for name in graph}
    groups = {frozenset(b for b in reach[a] if b in graph and a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def part_of(name: str, parts: dict[str, set[str]]) -> str | None:
    """The longest of the dotted prefixes in ``parts`` that contains a module."""
    found = [part for part in parts if name == part or name.startswith(f"{part}.")]
    return max(found, key=len, default=None)


def violations(prefix: str, allowed: dict[str, set[str]], base: set[str]) -> list[str]:
    """The imports below ``prefix`` that the table does not allow, as "importer → imported"."""
    wrong = []
    for name, targets in GRAPH.items():
        part = part_of(name.removeprefix(prefix), allowed) if name.startswith(prefix) else None
        for target in targets if part else ():
            inner = target.removeprefix(prefix)
            other = part_of(inner, allowed) if target.startswith(prefix) else None
            inside = target.startswith(prefix) and inner not in base
            if inside and other != part and other not in allowed[part]:
                wrong.append(f"{name} → {target}")
    return sorted(wrong)


def test_no_module_is_part_of_an_import_cycle():
    assert cycles(GRAPH) == []


def test_a_package_imports_only_lower_layers():
    assert violations("foreword.", LAYERS, BASE) == []


def test_a_part_of_the_batch_package_imports_only_lower_parts():
    assert violations("foreword.batch.", ROOMS, set()) == []


def test_every_module_belongs_to_a_layer():
    inner = [name.removeprefix("foreword.") for name in GRAPH if name != "foreword"]
    assert [name for name in inner if name not in BASE and part_of(name, LAYERS) is None] == []
    inner = [name.removeprefix("foreword.batch.") for name in GRAPH if name.startswith("foreword.batch.")]
    assert [name for name in inner if part_of(name, ROOMS) is None] == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"a"}}, [["a"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_cycles_are_found(graph, expected):
    assert cycles(graph) == expected
