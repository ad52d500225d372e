"""Imports between the modules of Foreword: no cycles, and those that the tables of docs/architecture.md have.

Every import counts, also those under TYPE_CHECKING and inside functions. An import from a package counts as an import
from the module that defines the name, so that an `__init__` that re-exports its modules is not part of a cycle.
"""

import ast
import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")


def table_of(first: str) -> list[tuple[tuple[str, ...], set[str]]]:
    """Return the rows of the page's table whose first column is ``first``: the names in it, and those they import."""
    lines = PAGE[PAGE.index(f"| {first} | subject | imports |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        (tuple(re.findall(r"`(\w+)`", names)), {name for name in imports.split(", ") if name})
        for names, _, imports in cells
    ]


PACKAGES, PARTS = table_of("package"), table_of("part")
BASE = set(PACKAGES[0][0])
"""Modules that any other may import."""

LAYERS = {name: imports for names, imports in PACKAGES for name in names}
"""Package → the packages that it imports."""

PARTS_OF_BATCH = {name: imports for names, imports in PARTS for name in names}
"""Part of `foreword.batch` → the parts that it imports. A module belongs to the longest prefix."""

FACES = {
    "foreword.batch",
    "foreword.batch.adapters",
    "foreword.batch.adapters.vllm",
    "foreword.batch.difference",
    "foreword.batch.proof.spec",
    "foreword.batch.step.layout",
    "foreword.batch.values.parameters",
    "foreword.batch.values.sampling_params",
}
"""The public modules of `foreword.batch`: what other packages import from it is a name of one of them."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
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


@cache  # made by the tests that need it, since every process of a parallel run imports this file
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


def part_of(name: str, parts: Collection[str]) -> str | None:
    """Return the longest of the dotted prefixes in ``parts`` that contains a module."""
    found = [part for part in parts if name == part or name.startswith(f"{part}.")]
    return max(found, key=len, default=None)


def imports_between(prefix: str, parts: Collection[str]) -> dict[tuple[str, str | None], list[str]]:
    """Map (part, part that it imports) to the imports, as "importer → imported", for the modules below ``prefix``."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for name, targets in sorted(import_graph().items()):
        part = part_of(name.removeprefix(prefix), parts) if name.startswith(prefix) else None
        for target in sorted(targets) if part else ():
            other = part_of(target.removeprefix(prefix), parts) if target.startswith(prefix) else None
            if target.startswith(prefix) and other != part:
                found.setdefault((part, other), []).append(f"{name} → {target}")
    return found


def check(prefix: str, table: dict[str, set[str]], base: set[str]) -> None:
    """Compare the imports below ``prefix`` with a table of the page."""
    found = {pair: imports for pair, imports in imports_between(prefix, table).items() if pair[1] not in base}
    assert {pair: imports for pair, imports in found.items() if pair[1] not in table[pair[0]]} == {}
    assert [(part, other) for part, others in table.items() for other in others if (part, other) not in found] == []


def test_no_module_is_part_of_an_import_cycle():
    assert cycles(import_graph()) == []


def test_a_package_imports_exactly_the_packages_of_its_row():
    check("foreword.", LAYERS, BASE)


def test_a_part_of_the_batch_package_imports_exactly_the_parts_of_its_row():
    check("foreword.batch.", PARTS_OF_BATCH, set())


def test_a_module_that_every_package_may_import_imports_only_such_modules():
    assert {other for part, other in imports_between("foreword.", LAYERS) if part in BASE} <= BASE


@pytest.mark.parametrize("rows", [PACKAGES, PARTS], ids=["packages", "parts of batch"])
def test_a_row_imports_only_rows_above_it(rows):
    above: set[str] = set()
    for names, imports in rows:
        assert (names, imports - above) == (names, set())
        above.update(names)


def test_the_tables_have_every_module():
    inner = [name.removeprefix("foreword.") for name in import_graph() if name != "foreword"]
    assert [name for name in inner if part_of(name, LAYERS) is None] == []
    assert [name for name in LAYERS if name != "_native" and name not in inner] == []
    inner = [name.removeprefix("foreword.batch.") for name in import_graph() if name.startswith("foreword.batch.")]
    assert [name for name in inner if part_of(name, PARTS_OF_BATCH) is None] == []
    assert [name for name in PARTS_OF_BATCH if name not in inner] == []


def public_names(face: str) -> set[str]:
    """``__all__`` of a module; without one every name without ``_`` that it binds itself."""
    module = import_module(face)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", face) == face}
    return set(getattr(module, "__all__", {name for name in own if name[0] != "_"}))


def test_other_packages_import_only_public_names_of_the_batch_package():
    public = {(face, name) for face in FACES for name in public_names(face)}
    public |= {(face, None) for face in FACES} | {face.rpartition(".")[::2] for face in FACES}
    behind = []
    for path in sorted(SRC.glob("foreword/**/*.py")):
        name = module_name(path)
        if not f"{name}.".startswith("foreword.batch."):
            used = {(module, imported) for module, imported, _ in imports_of(name, path)}
            used |= {(text, None) for text in strings_of(path) if text in import_graph()}  # for `import_module`
            behind += [f"{name}: {m}, {n}" for m, n in used - public if f"{m}.".startswith("foreword.batch.")]
    assert behind == []


def strings_of(path: Path) -> set[str]:
    """The string constants of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@cache
def private_names(package: str) -> tuple[set[str], set[str]]:
    """The private names that the files of a package define, and those that they read of another object than ``self``
    or ``cls``.
    """
    defined: set[str] = set()
    read: set[str] = set()
    for path in SRC.glob(f"foreword/{package}/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=value, attr=attr):
                    own = isinstance(value, ast.Name) and value.id in ("self", "cls")
                    (defined if own or isinstance(node.ctx, ast.Store) else read).add(attr)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
    defined, read = ({name for name in names if name[0] == "_" and name[:2] != "__"} for names in (defined, read))
    return defined, read


@pytest.mark.parametrize("package", sorted(set(LAYERS) - {"batch", "__main__"}))
def test_a_package_reads_no_private_name_of_the_batch_package(package):
    of_batch, _ = private_names("batch")
    defined, read = private_names(package)
    assert read & of_batch - defined == set()


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
