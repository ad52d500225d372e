"""Write src/foreword/_native.pyi, the types of the native module, from the module itself.

    make stubs

nanobind's stubgen reads the signatures that the bindings record. Here its array types, which also state layout and
device, become the names of foreword.arrays. The result depends neither on the instruction set nor on the version of
Python; tests/test_native_stub.py compares the file with it.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import GenericAlias

import numpy as np
from nanobind.stubgen import StubGen
from numpy.typing import NDArray

from foreword import _native, arrays

STUB = Path(__file__).resolve().parents[1] / "src" / "foreword" / "_native.pyi"


def generate() -> ast.Module:
    """Return the types of the native module."""
    stubs = StubGen(_native)
    stubs.put(_native)
    return canonical(ast.parse(stubs.get()))


def canonical(tree: ast.Module) -> ast.Module:
    """Return a stub with the array types of foreword.arrays and docstrings without indentation."""
    types = ArrayTypes()
    tree = types.visit(tree)
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.names]
    imports += [node for node in tree.body if isinstance(node, ast.Import) and "foreword.batch" in ast.unparse(node)]
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    names = ast.ImportFrom("foreword.arrays", [ast.alias(name) for name in sorted(types.used)], 0)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = inspect.cleandoc(node.value.value)
    return ast.Module([*body[:1], *imports, names, *body[1:]], [])


def array_type(dtype: str) -> str:
    """Return the name in foreword.arrays of the arrays of a dtype, given as the name of a scalar type of NumPy."""
    return next(name for name, found in vars(arrays).items() if found == NDArray[getattr(np, dtype)])


class ArrayTypes(ast.NodeTransformer):
    """Replace ``Annotated[NDArray[numpy.int32], …]`` and ``foreword.arrays.I32`` by ``I32``, and drop their imports."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def named(self, name: str) -> ast.Name:
        self.used.add(name)
        return ast.Name(name)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match ast.unparse(node.value), node.slice:
            case "Annotated", ast.Tuple(elts=[array, *_]):
                return self.visit(array)
            case "NDArray", ast.Attribute(attr=dtype):
                return self.named(array_type(dtype))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        is_array = node.id == "NDArray" or isinstance(vars(arrays).get(node.id), GenericAlias)
        return self.named(node.id.replace("NDArray", "AnyArray")) if is_array else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self.named(node.attr) if ast.unparse(node.value) == "foreword.arrays" else self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        kept = [alias for alias in node.names if alias.name not in {"Annotated", "NDArray"}]
        return ast.ImportFrom(node.module, [] if node.module == "foreword.arrays" else kept, 0)


def main() -> None:
    STUB.write_text(ast.unparse(ast.fix_missing_locations(generate())))
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, str(STUB)], check=True)


if __name__ == "__main__":
    main()
