"""Small changes of the functions of `foreword.vllm`, each of which some launch should notice.

A mutant is a module with one node changed: a comparison, an operator, a number, a negation, or a statement left out.
"""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Mutant:
    """A mutation: what was changed, in which function, and the functions of the changed module."""

    function: str
    change: str
    functions: dict[str, Callable[..., None]]


def mutants(module: ModuleType, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a module, function by function."""
    tree = ast.parse(source)
    places = [
        (function.name, place)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name != "is_native"
        for statement in function.body
        for place in ast.walk(statement)
    ]
    for function, place in places:
        for change in _changes(place):
            before = copy.copy(vars(place))
            text = ast.unparse(place)
            vars(place).update(change)
            shown = f"{text} -> {ast.unparse(place)}"
            namespace = {"__name__": module.__name__, "__file__": module.__file__}
            exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), namespace)
            if "available" in namespace:
                namespace["available"] = lambda: False  # the lines of NumPy are changed
            vars(place).update(before)
            yield Mutant(function, f"line {getattr(place, 'lineno', 0)}: {shown}", namespace)  # type: ignore[arg-type]


def _changes(node: ast.AST) -> Iterator[dict[str, object]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield {"ops": [COMPARISONS[type(op)]()]}
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield {"op": OPERATORS[type(op)]()}
        case ast.Constant(value=bool(value)):
            yield {"value": not value}
        case ast.Constant(value=int() | float() as number):
            yield {"value": number + 1}
        case ast.UnaryOp(op=ast.Invert()):
            yield {"op": ast.UAdd()}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name() | ast.Call() | ast.Attribute()):
            yield {"op": ast.UAdd()}
        case ast.BoolOp(op=op):
            yield {"op": ast.And() if isinstance(op, ast.Or) else ast.Or()}
        case ast.Assign(targets=[ast.Subscript()]):
            yield _kept(node)
        case ast.If(test=ast.Call(func=ast.Name("is_native" | "available"))):
            return  # native code has the same bits
        case ast.If(test=test):
            yield {"test": ast.UnaryOp(ast.Not(), test)}


def _kept(node: ast.Assign) -> dict[str, object]:
    """The assignment of what a place holds to itself."""
    value = copy.deepcopy(node.targets[0])
    vars(value)["ctx"] = ast.Load()
    return {"value": value}


def noticed(call: Callable[[], list[str]]) -> bool:
    """Return whether a mutant raises or gives other results."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return bool(call())
        except Exception:
            return True
